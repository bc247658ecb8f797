//! Packing: blocks of the factors are copied to the order in which the micro-kernel reads them.

use super::matrix::MatRef;
use super::micro_kernel::{COLUMNS, PANEL, prefetch};
use crate::kernels::cpu::simd::vectorized;
use crate::kernels::cpu::{Real, Stored};
use std::ops::Range;

/// How many lines ahead to prefetch: lines are too far apart for the hardware prefetcher.
const AHEAD: usize = 4;

/// The number of lines that are transposed at a time.
const LINES: usize = 4;

/// A block of a for the micro-kernel: its address and strides.
#[derive(Clone, Copy)]
pub(super) struct Panels<W> {
    pub a: *const W,
    /// The stride from one row to the next in a panel.
    pub row: usize,
    /// The stride from one column to the next.
    pub col: usize,
    /// The stride from one panel to the next.
    pub panel: usize,
}

/// Returns whether blocks of a are read in place: contiguous rows in the compute type.
pub(super) fn is_read_in_place<A: Stored>(a: MatRef<'_, A>) -> bool {
    a.col_stride == 1 && A::as_wide(&[]).is_some()
}

/// Returns the number of elements that [`a_block`] needs for a block of that size.
pub(super) fn a_elements(rows: usize, depth: usize) -> usize {
    rows.div_ceil(PANEL) * panel_elements(depth)
}

/// Returns the stride between packed panels: one cache line more than a panel holds, so that panels written together do
/// not compete for the same cache sets.
fn panel_elements(depth: usize) -> usize {
    PANEL * depth + COLUMNS
}

/// Returns a block of a: in place if possible, else packed into `to`. Contiguous rows are copied row by row; otherwise
/// the block is packed into panels of a few rows: (panels, depth, PANEL).
pub(super) fn a_block<A: Stored>(
    a: MatRef<'_, A>,
    rows: Range<usize>,
    depth: Range<usize>,
    to: &mut [A::Wide],
) -> Panels<A::Wide> {
    if is_read_in_place(a)
        && let Some(wide) = A::as_wide(a.data)
    {
        return Panels {
            a: wide[rows.start * a.row_stride + depth.start..].as_ptr(),
            row: a.row_stride,
            col: 1,
            panel: PANEL * a.row_stride,
        };
    }
    let length = depth.len();
    if a.col_stride == 1 {
        vectorized(
            #[inline(always)]
            || {
                for (row, to) in rows.zip(to.chunks_exact_mut(length)) {
                    A::load(&a.data[row * a.row_stride..][depth.clone()], to);
                }
            },
        );
        return Panels {
            a: to.as_ptr(),
            row: length,
            col: 1,
            panel: PANEL * length,
        };
    }
    let panel = panel_elements(length);
    vectorized(
        #[inline(always)]
        || {
            for (k, line) in depth.enumerate() {
                let line = &a.data[line * a.col_stride..][rows.clone()];
                let (whole, rest) = line.as_chunks::<PANEL>();
                let to = &mut to[k * PANEL..];
                for (i, from) in whole.iter().enumerate() {
                    prefetch(from.as_ptr().wrapping_add(AHEAD * a.col_stride));
                    A::load(from, &mut to[i * panel..][..PANEL]);
                }
                if !rest.is_empty() {
                    A::load(rest, &mut to[whole.len() * panel..][..rest.len()]);
                }
            }
        },
    );
    Panels {
        a: to.as_ptr(),
        row: 1,
        col: PANEL,
        panel,
    }
}

/// Packs a block of b into `to`, in units of COLUMNS columns: (units, depth, COLUMNS), padded with zeros. `lines` is
/// scratch of (LINES, depth).
pub(super) fn b_block<B: Stored>(
    b: MatRef<'_, B>,
    depth: Range<usize>,
    columns: Range<usize>,
    to: &mut [B::Wide],
    lines: &mut [B::Wide],
) {
    let length = depth.len();
    let unit = length * COLUMNS;
    let to = &mut to[..columns.len().div_ceil(COLUMNS) * unit];
    if b.col_stride == 1 {
        vectorized(
            #[inline(always)]
            || {
                for (k, row) in depth.enumerate() {
                    let row = &b.data[row * b.row_stride..][columns.clone()];
                    let (whole, rest) = row.as_chunks::<COLUMNS>();
                    for (i, from) in whole.iter().enumerate() {
                        prefetch(from.as_ptr().wrapping_add(AHEAD * b.row_stride));
                        B::load(from, &mut to[i * unit + k * COLUMNS..][..COLUMNS]);
                    }
                    if !rest.is_empty() {
                        let to = &mut to[whole.len() * unit + k * COLUMNS..][..COLUMNS];
                        let (filled, beyond) = to.split_at_mut(rest.len());
                        B::load(rest, filled);
                        beyond.fill(B::Wide::ZERO);
                    }
                }
            },
        );
        return;
    }
    vectorized(
        #[inline(always)]
        || {
            for first in (0..columns.len().next_multiple_of(COLUMNS)).step_by(LINES) {
                let to = &mut to[first / COLUMNS * unit + first % COLUMNS..];
                let start = columns.start + first;
                let count = columns.len().saturating_sub(first).min(LINES);
                let line = |i: usize| &b.data[(start + i) * b.col_stride..][depth.clone()];
                if count == LINES
                    && let [Some(l0), Some(l1), Some(l2), Some(l3)] =
                        [0, 1, 2, 3].map(|i| B::as_wide(line(i)))
                {
                    transpose([l0, l1, l2, l3], to, LINES * b.col_stride);
                    continue;
                }
                let (filled, beyond) = lines[..LINES * length].split_at_mut(count * length);
                for (i, to) in filled.chunks_exact_mut(length).enumerate() {
                    B::load(line(i), to);
                }
                beyond.fill(B::Wide::ZERO);
                let lines = std::array::from_fn(|i| &lines[i * length..][..length]);
                transpose(lines, to, 0);
            }
        },
    );
}

/// Writes `to[k][..LINES] = lines[..LINES][k]`: lines (LINES, depth), to (depth, COLUMNS) from some column on.
/// Prefetches the lines `ahead` elements further.
#[inline(always)]
fn transpose<W: Real>(lines: [&[W]; LINES], to: &mut [W], ahead: usize) {
    let [(l0, r0), (l1, r1), (l2, r2), (l3, r3)] = lines.map(<[W]>::as_chunks::<LINES>);
    let quads = l0.len();
    let (l1, l2, l3) = (&l1[..quads], &l2[..quads], &l3[..quads]);
    for k in 0..quads {
        if k % 4 == 0 && ahead > 0 {
            for line in [l0, l1, l2, l3] {
                prefetch(line[k].as_ptr().wrapping_add(ahead));
            }
        }
        let block = transpose_block([l0[k], l1[k], l2[k], l3[k]]);
        for (i, line) in block.into_iter().enumerate() {
            to[(k * LINES + i) * COLUMNS..][..LINES].copy_from_slice(&line);
        }
    }
    for k in 0..r0.len() {
        to[(quads * LINES + k) * COLUMNS..][..LINES].copy_from_slice(&[r0[k], r1[k], r2[k], r3[k]]);
    }
}

#[inline(always)]
fn transpose_block<W: Real>(lines: [[W; LINES]; LINES]) -> [[W; LINES]; LINES] {
    #[cfg(target_arch = "x86_64")]
    if std::any::TypeId::of::<W>() == std::any::TypeId::of::<f32>() {
        use std::arch::x86_64::{
            __m128, _mm_movehl_ps, _mm_movelh_ps, _mm_unpackhi_ps, _mm_unpacklo_ps,
        };
        // SAFETY: both are sixteen f32, and SSE is part of the architecture. The compiler turns the loop below into
        // scalar moves, four times as many instructions.
        unsafe {
            let [r0, r1, r2, r3] = std::mem::transmute_copy::<_, [__m128; LINES]>(&lines);
            let (a, b) = (_mm_unpacklo_ps(r0, r1), _mm_unpackhi_ps(r0, r1));
            let (c, d) = (_mm_unpacklo_ps(r2, r3), _mm_unpackhi_ps(r2, r3));
            let columns = [
                _mm_movelh_ps(a, c),
                _mm_movehl_ps(c, a),
                _mm_movelh_ps(b, d),
                _mm_movehl_ps(d, b),
            ];
            return std::mem::transmute_copy(&columns);
        }
    }
    std::array::from_fn(|k| lines.map(|line| line[k]))
}
