//! Whole operands to the type that is computed in, and results back; nothing is copied that is in that type.

use super::threads::Threads;
use crate::kernels::cpu::simd::vectorized;
use crate::kernels::cpu::{Real, Stored, parallel};
use std::borrow::Cow;

/// `x` in the type that is computed in.
pub(crate) fn wide<T: Stored>(x: &[T], threads: Threads) -> Cow<'_, [T::Wide]> {
    if let Some(x) = T::as_wide(x) {
        return Cow::Borrowed(x);
    }
    let mut wide = vec![T::Wide::ZERO; x.len()];
    for_blocks(&mut wide, threads, |start, wide| {
        let x = &x[start..start + wide.len()];
        vectorized(
            #[inline(always)]
            || T::load(x, wide),
        );
    });
    Cow::Owned(wide)
}

/// Lets `fill` update `to` in the type that is computed in, and rounds what it leaves.
///
/// `fill` sees what `to` holds where `read`, and zeros or what `to` holds where not.
pub(crate) fn rounded<T: Stored>(
    to: &mut [T],
    read: bool,
    threads: Threads,
    fill: impl FnOnce(&mut [T::Wide]),
) {
    if let Some(to) = T::as_wide_mut(to) {
        return fill(to);
    }
    let mut buffer = match read {
        true => wide(to, threads).into_owned(),
        false => vec![T::Wide::ZERO; to.len()],
    };
    fill(&mut buffer);
    for_blocks(to, threads, |start, to| {
        let wide = &buffer[start..start + to.len()];
        vectorized(
            #[inline(always)]
            || T::store(wide, to),
        );
    });
}

/// Calls `f(start, block)` on consecutive blocks of `x`.
fn for_blocks<T: Send>(x: &mut [T], threads: Threads, f: impl Fn(usize, &mut [T]) + Sync) {
    match threads {
        Threads::All => parallel::for_rows(x, 1, f),
        Threads::One => f(0, x),
    }
}
