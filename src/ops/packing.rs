//! The room that matrix products take, by the kernels' own account: packed blocks of their factors.

use crate::graph::{MemoryStep, Room, Target};
use crate::kernels::cpu::gemm::{ProductSizes, Threads, packing_bytes};

/// `y = x W^T`: x (rows, from), W (to, from), y (rows, to).
#[derive(Clone, Copy)]
pub(super) struct LinearProduct {
    pub rows: usize,
    pub from: usize,
    pub to: usize,
    /// Bytes an element of what is multiplied.
    pub element_bytes: usize,
}

impl LinearProduct {
    /// While y is made.
    pub fn forward(self, target: Target) -> Option<Room> {
        packed(target, self.sizes())
    }

    /// While `dx = dy W` is made.
    pub fn dx(self, target: Target) -> Option<Room> {
        packed(target, self.dx_sizes())
    }

    /// While `dW = dy^T x` is made.
    pub fn dw(self, target: Target) -> Option<Room> {
        let sizes = ProductSizes {
            rows: self.to,
            depth: self.rows,
            a_transposed: true,
            ..self.dx_sizes()
        };
        packed(target, sizes)
    }

    /// Makes dx, and then dW, each if it is asked for.
    pub fn backward(self, target: Target) -> Vec<MemoryStep> {
        let gradient = |of, taking| MemoryStep::Gradient {
            of,
            if_tracked: true,
            taking,
        };
        vec![gradient(0, self.dx(target)), gradient(1, self.dw(target))]
    }

    fn sizes(self) -> ProductSizes {
        ProductSizes {
            rows: self.rows,
            depth: self.from,
            cols: self.to,
            a_transposed: false,
            b_transposed: true,
            element_bytes: self.element_bytes,
        }
    }

    fn dx_sizes(self) -> ProductSizes {
        ProductSizes {
            depth: self.to,
            cols: self.from,
            b_transposed: false,
            ..self.sizes()
        }
    }
}

/// What one product of all threads packs. cuBLAS packs nothing.
fn packed(target: Target, sizes: ProductSizes) -> Option<Room> {
    (target == Target::Cpu).then(|| of_bytes(packing_bytes(sizes, Threads::All)))
}

/// What `matrices` products of one size pack: as many at once as there are threads, or one after another by all of
/// them.
pub(super) fn packed_batch(target: Target, matrices: usize, sizes: ProductSizes) -> Option<Room> {
    if target != Target::Cpu {
        return None;
    }
    let threads = rayon::current_num_threads();
    let bytes = match matrices < 2 * threads {
        true => packing_bytes(sizes, Threads::All),
        false => threads as f64 * packing_bytes(sizes, Threads::One),
    };
    Some(of_bytes(bytes))
}

fn of_bytes(bytes: f64) -> Room {
    Room {
        what: "factors, packed for a product",
        formula: "blocks of a, b and c, a thread",
        elements: bytes / 4.0,
        element_bytes: 4,
    }
}
