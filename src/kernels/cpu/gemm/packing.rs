//! Memory that matmuls allocate for packing, for memory estimates.

use super::choice::{MatmulSizes, prefers_own_gemm_by};
use super::panels::{PANEL_FLOPS, PanelCut};
use super::threads::Threads;

/// Returns the peak of the memory that `matmul_to` allocates and frees during a matmul, in bytes. It never decreases
/// with the size. f64 because huge sizes must not overflow.
///
/// The crate's own kernel allocates nothing: each thread keeps its packing buffer, 0.75 MiB from its first matmul on
/// and 2.5 MiB from its first in half precision ([`reserve_scratch`](super::reserve_scratch)). The `gemm` crate
/// allocates packing buffers each time, and packs all rows of a together if a is stored column by column.
pub fn packing_bytes(sizes: MatmulSizes, threads: Threads) -> f64 {
    let is_half = sizes.element_bytes < 4;
    if sizes.rows == 0 || sizes.depth == 0 || sizes.cols == 0 {
        return 0.0;
    }
    match is_half || prefers_own_gemm_by(sizes) {
        true => 0.0,
        false => sizes.element_bytes as f64 * crate_elements(sizes, threads),
    }
}

/// Returns the number of elements that the `gemm` crate packs for the panels that run concurrently.
fn crate_elements(sizes: MatmulSizes, threads: Threads) -> f64 {
    let MatmulSizes {
        rows, depth, cols, ..
    } = sizes;
    let packed_depth = depth.min(CRATE_DEPTH) as f64;
    if threads == Threads::One {
        let [of_a, of_b] = panel_lines(sizes, rows, cols);
        return packed_depth * (of_a + of_b);
    }
    // A matmul of fewer rows or less depth is divided into fewer panels, each of which may pack more. `share` is the
    // largest fraction of rows or depth that is divided into `count` panels.
    let flops = 2.0 * rows as f64 * cols as f64 * depth as f64;
    let most = PanelCut::count_of(rows, depth, cols);
    let counts = (1..=most).map(|count| {
        let share = match count == most {
            true => 1.0,
            false => ((count + 1) as f64 * PANEL_FLOPS / flops).min(1.0),
        };
        let panels = PanelCut::with_count(count, rows, cols);
        let [of_a, of_b] = match panels.by_rows {
            true => panel_lines(sizes, panels.step.min(rows), cols),
            false => panel_lines(sizes, rows, panels.step.min(cols)),
        };
        let at_once = panels.count.min(rayon::current_num_threads());
        at_once as f64 * (packed_depth.min(share * depth as f64) * of_a + packed_depth * of_b)
    });
    counts.fold(0.0, f64::max)
}

/// The depth that the `gemm` crate packs at a time.
const CRATE_DEPTH: usize = 512;

/// Returns how many lines of a and b the `gemm` crate packs for one panel: `gemm_basic_generic` of gemm 0.19, whose lhs
/// is our b^T and whose rhs our a^T, on AVX-512. Narrower registers have smaller blocks.
fn panel_lines(sizes: MatmulSizes, rows: usize, cols: usize) -> [f64; 2] {
    const REGISTERS: usize = 64;
    const BLOCK: usize = 8 * REGISTERS;
    let packs_a = match sizes.a_transposed {
        true => cols > 2 * REGISTERS,
        false => cols > 128 * REGISTERS,
    };
    let packs_b = cols <= 2 * BLOCK && (sizes.b_transposed || !cols.is_multiple_of(16));
    let of_a = if packs_a { rows as f64 } else { 0.0 };
    let of_b = match packs_b {
        true => cols.next_multiple_of(REGISTERS) as f64,
        false => 0.0,
    };
    [of_a, of_b]
}
