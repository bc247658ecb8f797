//! Attention with its probabilities in memory, one matrix of (queries, keys) after another, so that scores meet their
//! softmax and their product with v while they are in cache.

use crate::kernels::attention::Sizes;
use crate::kernels::cpu::gemm::bf16::unit_of_tiles;
use crate::kernels::cpu::gemm::widen::{rounded, wide};
use crate::kernels::cpu::gemm::{MatRef, Threads, matmul_by};
use crate::kernels::cpu::parallel::{self, Shared};
use crate::kernels::cpu::rows::softmax;
use crate::kernels::cpu::{Real, Stored};
use crate::probe::parts::{Part, timed};
use std::borrow::Cow;

/// Runs `f(matrix, threads)` for `count` matrices: side by side where there are enough of them for the threads, else
/// one after another with all threads inside each. The bits are the same either way.
fn for_matrices(count: usize, f: impl Fn(usize, Threads) + Sync + Send) {
    if count < 2 * rayon::current_num_threads() {
        (0..count).for_each(|matrix| f(matrix, Threads::All));
    } else {
        parallel::for_tasks(count, |matrix| f(matrix, Threads::One));
    }
}

/// A matrix of a batch: `size` elements from `index * size`, widened.
fn at<T: Stored>(data: &[T], index: usize, size: usize, threads: Threads) -> Cow<'_, [T::Wide]> {
    wide(&data[index * size..(index + 1) * size], threads)
}

/// What is attended with.
#[derive(Clone, Copy)]
pub struct Inputs<'a, T> {
    /// (B H, Tq, Dh).
    pub q: &'a [T],
    /// (B Hkv, Tk, Dh).
    pub k: &'a [T],
    /// (B Hkv, Tk, Dv).
    pub v: &'a [T],
    /// The first key that each query sees, (B, Tq), or nothing.
    pub first_keys: &'a [u32],
}

/// `p = softmax(scale q k^T)` over the keys that are seen, `out = p v`: p (B H, Tq, Tk), out (B H, Tq, Dv); with the
/// log-sum-exp of every query's scores in `lse` (B H, Tq), unless that is empty.
///
/// p is in the type computed in: rounded to half precision, it would cost the gradients more than their own rounding.
pub fn forward<T: Stored>(
    sizes: &Sizes,
    inputs: Inputs<'_, T>,
    p: &mut [T::Wide],
    lse: &mut [T::Wide],
    out: &mut [T],
) {
    let Inputs {
        q,
        k,
        v,
        first_keys,
    } = inputs;
    let Sizes {
        queries,
        keys,
        head_dim,
        value_dim,
        scale,
        ..
    } = *sizes;
    let matrices = sizes.matrices();
    if matrices == 0 {
        return;
    }
    let group = sizes.group();
    let unit = unit_of_tiles::<T>(head_dim);
    let lse_size = lse.len() / matrices;
    let (p, lse, out) = (Shared::new(p), Shared::new(lse), Shared::new(out));
    for_matrices(matrices, |i, threads| {
        let q = at(q, i, queries * head_dim, threads);
        let k = at(k, i / group, keys * head_dim, threads);
        let v = at(v, i / group, keys * value_dim, threads);
        let (q, k) = (
            MatRef::new(&q, queries, head_dim),
            MatRef::new(&k, keys, head_dim),
        );
        let v = MatRef::new(&v, keys, value_dim);
        let (p_size, out_size) = (queries * keys, queries * value_dim);
        // SAFETY: matrix i is written by this call alone.
        let p = unsafe { p.range(i * p_size, p_size) };
        let lse = unsafe { lse.range(i * lse_size, lse_size) };
        let out = unsafe { out.range(i * out_size, out_size) };
        timed(Part::Scores, || {
            matmul_by(unit, q, k.t(), p, false, threads)
        });
        let seen = sizes.seen(first_keys, i / sizes.heads);
        softmax::forward_in_place(p, seen, scale, lse, threads);
        let p = MatRef::new(p, queries, keys);
        rounded(out, false, threads, |out| {
            timed(Part::Values, || matmul_by(unit, p, v, out, false, threads))
        });
    });
}

/// `dq`, `dk` and `dv` from `dout`, and from q, k, v and p as forward had them.
///
/// `dv = p^T dout`, `dp = dout v^T`, `ds = scale p (dp - sum(dp p))`, `dq = ds k`, `dk = ds^T q`. dp and ds share one
/// buffer of (queries, keys) a thread. One task has a matrix of k and v and all that q's matrices add to its gradients,
/// one after another: the sums' order is fixed.
pub fn backward<T: Stored>(
    sizes: &Sizes,
    inputs: Inputs<'_, T>,
    dout: &[T],
    p: &[T::Wide],
    [dq, dk, dv]: [&mut [T]; 3],
) {
    let Inputs {
        q,
        k,
        v,
        first_keys,
    } = inputs;
    let Sizes {
        queries,
        keys,
        head_dim,
        value_dim,
        scale,
        ..
    } = *sizes;
    let matrices = sizes.matrices();
    if matrices == 0 {
        dk.fill(T::zero()); // to which no query adds
        dv.fill(T::zero());
        return;
    }
    let group = sizes.group();
    let unit = unit_of_tiles::<T>(head_dim);
    let (dq, dk, dv) = (Shared::new(dq), Shared::new(dk), Shared::new(dv));
    for_matrices(sizes.kv_matrices(), |shared, threads| {
        let k = at(k, shared, keys * head_dim, threads);
        let v = at(v, shared, keys * value_dim, threads);
        let k = MatRef::new(&k, keys, head_dim);
        let v = MatRef::new(&v, keys, value_dim);
        let (k_size, v_size) = (keys * head_dim, keys * value_dim);
        // SAFETY: matrix `shared` of k and v, and its group's of q, are written by this call alone.
        let dk = unsafe { dk.range(shared * k_size, k_size) };
        let dv = unsafe { dv.range(shared * v_size, v_size) };
        let mut ds = vec![T::Wide::ZERO; queries * keys]; // (queries, keys)
        let mut members = |dk: &mut [T::Wide], dv: &mut [T::Wide]| {
            for i in shared * group..(shared + 1) * group {
                let accumulate = i > shared * group;
                let q = at(q, i, queries * head_dim, threads);
                let dout = at(dout, i, queries * value_dim, threads);
                let q = MatRef::new(&q, queries, head_dim);
                let dout = MatRef::new(&dout, queries, value_dim);
                let p_rows = &p[i * ds.len()..(i + 1) * ds.len()];
                let p = MatRef::new(p_rows, queries, keys);
                let q_size = queries * head_dim;
                // SAFETY: as above.
                let dq = unsafe { dq.range(i * q_size, q_size) };
                timed(Part::Values, || {
                    matmul_by(unit, p.t(), dout, dv, accumulate, threads);
                    matmul_by(unit, dout, v.t(), &mut ds, false, threads); // dp
                });
                let seen = sizes.seen(first_keys, i / sizes.heads);
                softmax::backward_in_place(&mut ds, p_rows, seen, scale, threads);
                let ds = MatRef::new(&ds, queries, keys);
                rounded(dq, false, threads, |dq| {
                    timed(Part::Scores, || matmul_by(unit, ds, k, dq, false, threads))
                });
                timed(Part::Scores, || {
                    matmul_by(unit, ds.t(), q, dk, accumulate, threads)
                });
            }
        };
        rounded(dk, false, threads, |dk| {
            rounded(dv, false, threads, |dv| members(dk, dv))
        });
    });
}
