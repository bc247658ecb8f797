//! The reported packing buffers of matmuls, against their allocations.

use crate::child;
use half::bf16;
use proptest::prelude::*;
use tallow::internals::Stored;
use tallow::internals::gemm::{MatRef, MatmulSizes, Threads, matmul, packing_bytes};
use tallow::memory::tracker;

fn sizes(rows: usize, depth: usize, cols: usize) -> MatmulSizes {
    MatmulSizes {
        rows,
        depth,
        cols,
        a_transposed: false,
        b_transposed: true,
        element_bytes: 2,
    }
}

/// Returns the peak allocation of a matmul, in bytes, on a thread that has computed one of the same sizes.
fn measured_bytes<T: Stored>(sizes: MatmulSizes) -> u64 {
    let MatmulSizes {
        rows, depth, cols, ..
    } = sizes;
    let a = vec![T::one(); rows * depth];
    let b = vec![T::one(); depth * cols];
    let mut c = vec![T::one(); rows * cols];
    let a = MatRef::new(&a, rows, depth);
    let b = MatRef::new(&b, cols, depth).t();
    matmul(a, b, &mut c, false, Threads::One);
    tracker::reset_peak();
    let before = tracker::current_bytes().unwrap();
    matmul(a, b, &mut c, false, Threads::One);
    tracker::peak_bytes().unwrap() - before
}

/// Runs in its own process, because the tracker counts per process, and in a pool of one thread, because other threads
/// allocate when they start.
#[test]
fn packing_bytes_are_those_allocated() {
    if child::ran("memory::packing::packing_bytes_are_those_allocated") {
        return;
    }
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build();
    pool.unwrap().install(compare);
}

fn compare() {
    for (rows, depth, cols) in [
        (1, 1, 1),
        (8, 192, 48),
        (40, 512, 700),
        (100, 64, 130),
        (512, 700, 1344),
        (1024, 192, 3072),
        (513, 300, 500),
        (1500, 64, 10_000),
    ] {
        let half = sizes(rows, depth, cols);
        assert_eq!(packing_bytes(half, Threads::One), 0.0);
        assert!(
            measured_bytes::<bf16>(half) < 256,
            "{half:?}: kept by the thread"
        ); // except the list of blocks

        let full = MatmulSizes {
            element_bytes: 4,
            ..half
        };
        let (packed_bytes, measured_bytes) = (
            packing_bytes(full, Threads::One),
            measured_bytes::<f32>(full) as f64,
        );
        println!("{full:?}: {packed_bytes} {measured_bytes}");
        assert!(
            packed_bytes + 256.0 >= measured_bytes,
            "{full:?}: {packed_bytes} for {measured_bytes}"
        ); // plus one or two cache lines
        assert!(
            packed_bytes <= 2.1 * measured_bytes + 1024.0,
            "{full:?}: {packed_bytes} for {measured_bytes}"
        );
    }
}

proptest! {
    /// The largest size that fits is searched by bisection, over B and T: the rows of one operand, or the depth of a
    /// weight's gradient. So memory must not shrink with size, except where a larger matmul is this crate's own and not
    /// the `gemm` crate's: it packs into buffers that the threads keep.
    #[test]
    fn a_longer_product_packs_no_less(
        rows in 1usize..3000,
        depth in 1usize..3000,
        cols in 1usize..3000,
        more in 0usize..600,
        b_transposed: bool,
        half: bool,
    ) {
        let element_bytes = if half { 2 } else { 4 };
        let forward = MatmulSizes { b_transposed, element_bytes, ..sizes(rows, depth, cols) };
        let longer = MatmulSizes { rows: rows + more, ..forward };
        prop_assert!(is_no_less(packing_bytes(longer, Threads::All), packing_bytes(forward, Threads::All)));

        let gradient = MatmulSizes { a_transposed: true, b_transposed: false, ..forward };
        let deeper = MatmulSizes { depth: depth + more, ..gradient };
        prop_assert!(is_no_less(packing_bytes(deeper, Threads::All), packing_bytes(gradient, Threads::All)));
    }
}

fn is_no_less(longer: f64, shorter: f64) -> bool {
    longer >= shorter * (1.0 - 1e-12) || longer == 0.0 // terms may be summed in another order
}

#[test]
fn sizes_beyond_any_machine_do_not_overflow() {
    let most = usize::MAX;
    for element_bytes in [2, 4, 8] {
        for transposed in [false, true] {
            let sizes = MatmulSizes {
                a_transposed: transposed,
                element_bytes,
                ..sizes(most, most, most)
            };
            for threads in [Threads::One, Threads::All] {
                assert!(packing_bytes(sizes, threads).is_finite());
            }
        }
    }
    assert_eq!(packing_bytes(sizes(0, 5, 5), Threads::All), 0.0);
}
