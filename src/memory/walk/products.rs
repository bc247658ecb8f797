//! What matrix products take for packed blocks of their factors, by the kernels' own account.

use super::{Scratch, Size, Walk};
use crate::kernels::cpu::gemm::{ProductSizes, Threads, packing_bytes};

/// `y = x W^T`: x (BT, from), W (to, from), y (BT, to).
#[derive(Clone, Copy)]
pub(super) struct Linear {
    pub from: usize,
    pub to: usize,
    /// Bytes an element of what is multiplied.
    pub width: usize,
}

impl Walk {
    /// The next op is this product, forward and backward.
    pub(super) fn packs(&mut self, linear: Linear) {
        if let Some((what, size, width)) = self.packed(self.forward_of(linear)) {
            self.scratch_now(what, size, width);
        }
        let packing = self.packs_in_backward(linear);
        self.packs_later(packing.into());
    }

    /// This product is computed, with what is alive.
    pub(super) fn packs_now(&mut self, linear: Linear) {
        let packed = self.packed(self.forward_of(linear));
        self.with_scratch(packed, |_| ());
    }

    /// While `dx = dy W` is made, and `dW = dy^T x`.
    pub(super) fn packs_in_backward(&self, linear: Linear) -> [Scratch; 2] {
        let forward = self.forward_of(linear);
        let dx = ProductSizes {
            depth: linear.to,
            cols: linear.from,
            b_transposed: false,
            ..forward
        };
        let dw = ProductSizes {
            rows: linear.to,
            depth: forward.rows,
            a_transposed: true,
            ..dx
        };
        [dx, dw].map(|product| self.packed(product))
    }

    fn forward_of(&self, linear: Linear) -> ProductSizes {
        ProductSizes {
            rows: self.sizes.counts.rows,
            depth: linear.from,
            cols: linear.to,
            a_transposed: false,
            b_transposed: true,
            element_bytes: linear.width,
        }
    }

    fn packed(&self, product: ProductSizes) -> Scratch {
        if self.on_card() {
            return None;
        }
        let bytes = packing_bytes(product, Threads::All);
        let blocks = Size::new("blocks of a, b and c, a thread", bytes / 4.0);
        Some(("factors, packed for a product", blocks, 4))
    }
}
