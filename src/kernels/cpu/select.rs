//! Comparisons of slices, and selection by their results.

use super::parallel;

/// Computes `y = holds(a, b)`, 1 or 0, element by element; slices of one length.
pub fn compare<T: Copy + Sync>(
    a: &[T],
    b: &[T],
    y: &mut [u8],
    holds: impl Fn(T, T) -> bool + Sync,
) {
    assert!(a.len() == y.len() && b.len() == y.len());
    parallel::for_rows(y, 1, |first, y| {
        let each = y.iter_mut().zip(&a[first..]).zip(&b[first..]);
        each.for_each(|((y, a), b)| *y = holds(*a, *b).into());
    });
}

/// Computes `y = a` where the condition is not 0, else `y = b`; slices of one length. `other` stands for one that is
/// missing.
pub fn select<T: Copy + Send + Sync>(
    condition: &[u8],
    [a, b]: [Option<&[T]>; 2],
    other: T,
    y: &mut [T],
) {
    parallel::for_rows(y, 1, |first, y| {
        let condition = &condition[first..first + y.len()];
        let [a, b] = [a, b].map(|x| x.map(|x| &x[first..first + y.len()]));
        for (i, (y, condition)) in y.iter_mut().zip(condition).enumerate() {
            let from = if *condition != 0 { a } else { b };
            *y = from.map_or(other, |from| from[i]);
        }
    });
}
