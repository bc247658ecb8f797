//! Dimensions of strided copies and sums, as the CUDA kernels expect them: few, with the innermost last.

/// The most dimensions that the kernels accept, after [`merged_dims`].
pub(crate) const RANK: usize = 6;

/// A dimension of a strided copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Dim {
    pub size: usize,
    /// The stride of the source, in elements.
    pub from: usize,
    /// The stride of the destination, in elements.
    pub to: usize,
}

/// Returns fewer dimensions with the same elements in the same order. Dimensions of size 1 are dropped, and neighbours
/// are merged where both are contiguous with each other.
pub(crate) fn merged_dims(dims: impl Iterator<Item = Dim>) -> Vec<Dim> {
    let mut joined: Vec<Dim> = Vec::new();
    for dim in dims.filter(|dim| dim.size != 1) {
        match joined.last_mut() {
            Some(outer) if outer.from == dim.size * dim.from && outer.to == dim.size * dim.to => {
                *outer = Dim {
                    size: outer.size * dim.size,
                    ..dim
                };
            }
            _ => joined.push(dim),
        }
    }
    joined
}

/// Returns whether no two indices write the same element, apart from dimensions with `to` 0.
pub(crate) fn writes_are_disjoint(dims: &[Dim]) -> bool {
    let mut dims: Vec<&Dim> = dims.iter().filter(|dim| dim.to > 0).collect();
    dims.sort_by_key(|dim| dim.to);
    let mut last = 0; // the largest offset that the dimensions so far reach
    dims.iter().all(|dim| {
        let is_apart = dim.to > last;
        last += dim.size.saturating_sub(1) * dim.to;
        is_apart
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dims(dims: &[[usize; 3]]) -> Vec<Dim> {
        let dims = dims.iter().map(|&[size, from, to]| Dim { size, from, to });
        dims.collect()
    }

    #[test]
    fn dimensions_are_joined() {
        let all = |of: &[[usize; 3]]| merged_dims(dims(of).into_iter());
        assert_eq!(
            all(&[[2, 12, 12], [3, 4, 4], [4, 1, 1]]),
            dims(&[[24, 1, 1]])
        );
        assert_eq!(
            all(&[[2, 12, 0], [3, 4, 0], [4, 1, 1]]),
            dims(&[[6, 4, 0], [4, 1, 1]])
        );
        let transposed = [[2, 1, 3], [3, 2, 1]];
        assert_eq!(all(&transposed), dims(&transposed));
        assert_eq!(all(&[[1, 9, 9], [5, 1, 2], [1, 7, 7]]), dims(&[[5, 1, 2]]));
        assert_eq!(all(&[[1, 1, 1]]), dims(&[]));
    }

    #[test]
    fn places_that_overlap() {
        for apart in [
            dims(&[]),
            dims(&[[3, 4, 4], [4, 1, 1]]),
            dims(&[[3, 1, 1], [4, 3, 3]]),
            dims(&[[7, 0, 0], [4, 1, 2]]),
        ] {
            assert!(writes_are_disjoint(&apart), "{apart:?}");
        }
        for overlapping in [dims(&[[3, 3, 3], [4, 1, 1]]), dims(&[[2, 1, 1], [2, 1, 1]])] {
            assert!(!writes_are_disjoint(&overlapping), "{overlapping:?}");
        }
    }
}
