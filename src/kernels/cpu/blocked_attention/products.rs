//! Products whose right factor is taken in parts that stay in the first-level cache while all rows of the left one pass.

use crate::kernels::cpu::Lanes;
use crate::kernels::cpu::gemm::tile::Product;

/// Runs a product `step` columns at a time.
pub(super) fn by_columns<T: Lanes>(product: Product<'_, T>, step: usize) {
    for first in (0..product.columns).step_by(step) {
        let part = Product {
            b: &product.b[first..],
            c: &mut product.c[first..],
            columns: step.min(product.columns - first),
            ..product
        };
        part.run();
    }
}

/// Runs a product `step` terms at a time. The bits are those of all at once: every element is one chain of multiply-adds.
pub(super) fn by_depth<T: Lanes>(product: Product<'_, T>, step: usize) {
    for first in (0..product.depth).step_by(step) {
        let part = Product {
            a: &product.a[first * product.a_col..],
            b: &product.b[first * product.b_row..],
            c: &mut *product.c,
            depth: step.min(product.depth - first),
            accumulate: product.accumulate || first > 0,
            ..product
        };
        part.run();
    }
}
