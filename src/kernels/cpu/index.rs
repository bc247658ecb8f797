//! Elements by index along one dimension, the largest elements of rows, and one-hot rows.

use super::parallel::{self, Shared, TASK_ELEMENTS};
use super::{Real, Stored};
use candle_core::WithDType;
use std::cmp::Ordering;

/// The sizes of x (outer, n, inner) and of indices (outer, k, inner).
#[derive(Clone, Copy)]
pub struct Sizes {
    /// The elements of x along the dimension that is indexed.
    pub n: usize,
    /// The indices along it.
    pub k: usize,
    /// The elements after it.
    pub inner: usize,
}

/// Computes `y[o, j, i] = x[o, ids[o, j, i], i]`, 0 for an id that is `ignore`: x (outer, n, inner), ids and y
/// (outer, k, inner).
pub fn gather<T: WithDType>(x: &[T], ids: &[u32], sizes: Sizes, ignore: Option<u32>, y: &mut [T]) {
    let Sizes { n, k, inner } = sizes;
    let run = if inner == 1 { k } else { inner }; // consecutive elements whose columns are known without a division
    parallel::for_rows(y, 1, |first, y| {
        let (mut at, mut rest) = (first, y);
        while !rest.is_empty() {
            let start = at % run;
            let (part, others) = rest.split_at_mut(rest.len().min(run - start));
            let x = &x[at / (k * inner) * n * inner..][..n * inner];
            let each = part.iter_mut().zip(&ids[at..]).enumerate();
            for (i, (y, id)) in each {
                let column = if inner == 1 { 0 } else { start + i };
                *y = match Some(*id) == ignore {
                    true => T::zero(),
                    false => x[*id as usize * inner + column],
                };
            }
            at += part.len();
            rest = others;
        }
    });
}

/// Computes y (outer, n, inner): the base, or 0, and the sum in order of `values[o, j, i]` over the indices that are
/// `y`'s along n. values and ids (outer, k, inner). An id that is `ignore` adds nothing.
pub fn scatter_add<T: Stored>(
    base: Option<&[T::Wide]>,
    values: &[T],
    ids: &[u32],
    sizes: Sizes,
    ignore: Option<u32>,
    y: &mut [T::Wide],
) {
    let Sizes { n, k, inner } = sizes;
    parallel::for_rows(y, n * inner, |first, y| {
        match base {
            Some(base) => y.copy_from_slice(&base[first * n * inner..][..y.len()]),
            None => y.fill(T::Wide::ZERO),
        }
        for (outer, y) in (first..).zip(y.chunks_exact_mut(n * inner)) {
            let of_outer = outer * k * inner..(outer + 1) * k * inner;
            let each = ids[of_outer.clone()].iter().zip(&values[of_outer]);
            for (at, (id, value)) in each.enumerate() {
                if Some(*id) != ignore {
                    y[*id as usize * inner + at % inner] += T::Wide::real(value.to_f64());
                }
            }
        }
    });
}

/// Computes the indices of the k largest elements of each row of x (rows, n), the largest first: (rows, k). NaN is
/// larger than any number, and of equal elements the first comes first.
pub fn topk<T: WithDType>(x: &[T], n: usize, k: usize, indices: &mut [u32]) {
    if k == 0 || indices.is_empty() {
        return;
    }
    // The work is in the rows of x, not in the few indices.
    let rows = (TASK_ELEMENTS / n).max(1);
    let (count, indices) = (indices.len() / k, Shared::new(indices));
    parallel::for_tasks(count.div_ceil(rows), |task| {
        let rows = task * rows..count.min((task + 1) * rows);
        // SAFETY: only this task has these rows.
        let indices = unsafe { indices.range(rows.start * k, rows.len() * k) };
        for (row, indices) in rows.zip(indices.chunks_exact_mut(k)) {
            topk_of(&x[row * n..(row + 1) * n], indices);
        }
    });
}

/// The largest k whose elements are sorted by insertion.
const FEW: usize = 16;

fn topk_of<T: WithDType>(x: &[T], indices: &mut [u32]) {
    let k = indices.len();
    let order = |a: &u32, b: &u32| {
        let [of_a, of_b] = [a, b].map(|i| x[*i as usize].to_f64());
        descending(of_a, of_b).then(a.cmp(b))
    };
    if k > FEW {
        let mut all: Vec<u32> = (0..x.len() as u32).collect();
        all.select_nth_unstable_by(k - 1, order);
        all.truncate(k);
        all.sort_unstable_by(order);
        return indices.copy_from_slice(&all);
    }
    let mut best = [(0.0, 0u32); FEW];
    let mut found = 0;
    for (i, x) in (0u32..).zip(x) {
        let x = x.to_f64();
        // Later elements come after equal ones.
        if found == k && descending(x, best[k - 1].0) != Ordering::Less {
            continue;
        }
        let mut at = if found < k { found } else { k - 1 };
        found = k.min(found + 1);
        while at > 0 && descending(x, best[at - 1].0) == Ordering::Less {
            best[at] = best[at - 1];
            at -= 1;
        }
        best[at] = (x, i);
    }
    let each = indices.iter_mut().zip(&best);
    each.for_each(|(index, (_, i))| *index = *i);
}

/// Orders numbers from the largest to the smallest, NaN first.
fn descending(a: f64, b: f64) -> Ordering {
    match b.partial_cmp(&a) {
        Some(order) => order,
        None => b.is_nan().cmp(&a.is_nan()),
    }
}

/// Computes rows (ids, classes) with a 1 at each row's id and 0 elsewhere.
pub fn one_hot<T: WithDType>(ids: &[u32], classes: usize, y: &mut [T]) {
    parallel::for_rows(y, classes, |first, y| {
        for (row, id) in y.chunks_exact_mut(classes).zip(&ids[first..]) {
            row.fill(T::zero());
            row[*id as usize] = T::one();
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// NaN is the largest, equal elements keep their order, and both ways of sorting agree.
    #[test]
    fn the_largest_come_first() {
        let value = |i: usize| match i % 11 {
            5 => f32::NAN,
            _ => ((i * 7919) % 23) as f32,
        };
        let x: Vec<f32> = (0..200).map(value).collect();
        let mut all: Vec<u32> = (0..100).collect();
        all.sort_by(|a, b| descending(x[*a as usize].into(), x[*b as usize].into()));
        for k in [1, 2, FEW, FEW + 1, 100] {
            let mut found = vec![9999; 2 * k];
            topk(&x, 100, k, &mut found);
            assert_eq!(found[..k], all[..k], "{k}");
            assert!(x[100 + found[k] as usize].is_nan());
        }
    }

    #[test]
    fn sums_by_index_begin_at_the_base() {
        let sizes = Sizes {
            n: 3,
            k: 2,
            inner: 2,
        };
        let ids = [2, 0, 2, 7];
        let mut y = [0f32; 6];
        let base = [1f32; 6];
        scatter_add::<f32>(
            Some(&base),
            &[1.0, 2.0, 3.0, 4.0],
            &ids,
            sizes,
            Some(7),
            &mut y,
        );
        assert_eq!(y, [1.0, 3.0, 1.0, 1.0, 5.0, 1.0]);
        let mut back = [9f32; 4];
        gather(&y, &ids, sizes, Some(7), &mut back);
        assert_eq!(back, [5.0, 3.0, 5.0, 0.0]);
    }
}
