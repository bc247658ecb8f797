//! A matrix product in a plan, as linear maps and their gradients are.

use super::cpu::for_stored;
use super::lowering::{Kernel, Slices, on_gpu};
use crate::graph::Attribute;
use crate::kernels::cpu::Stored;
use crate::kernels::cpu::gemm::{MatMut, MatRef, Threads, matmul_sum};
#[cfg(feature = "cuda")]
use {
    super::lowering::Operands,
    crate::kernels::cuda::{matmul::Matrix, set_to_zero},
};

/// A factor of a [`product`]: rows and columns as it lies.
#[derive(Clone, Copy)]
pub(crate) struct Factor {
    pub rows: usize,
    pub cols: usize,
    pub transposed: bool,
}

impl Factor {
    pub fn new(rows: usize, cols: usize) -> Self {
        Self {
            rows,
            cols,
            transposed: false,
        }
    }

    pub fn t(self) -> Self {
        Self {
            transposed: !self.transposed,
            ..self
        }
    }

    fn of<'a, T: Stored>(
        k: &Kernel,
        x: &'a [T],
        [rows, cols, transposed]: [&str; 3],
    ) -> candle_core::Result<MatRef<'a, T>> {
        let x = MatRef::new(x, k.count(rows)?, k.count(cols)?);
        Ok(if k.flag(transposed) { x.t() } else { x })
    }
}

/// Reads a and b; writes `c = a b`, or `c +=` that where it `adds`. c is in the factors' dtype, or in the one that
/// products are summed in.
pub(crate) fn product(a: Factor, b: Factor, adds: bool) -> Kernel {
    fn into<T: Stored, C: Stored<Wide = T::Wide>>(
        k: &Kernel,
        s: &Slices<'_>,
    ) -> candle_core::Result<()> {
        let a = Factor::of(k, s.x::<T>("a")?, ["a_rows", "a_cols", "a_transposed"])?;
        let b = Factor::of(k, s.x::<T>("b")?, ["b_rows", "b_cols", "b_transposed"])?;
        let c = MatMut::new(s.y::<C>("c")?, k.count("rows")?, k.count("cols")?);
        matmul_sum(&[(a, b)], c, k.flag("adds"), Threads::All);
        Ok(())
    }
    let kernel = Kernel::new("matmul", |k, s| {
        let (read, written) = (s.dtype()?, s.dtype_written("c")?);
        for_stored!(read, T => match written == read {
            true => into::<T, T>(k, s),
            false => into::<T, <T as Stored>::Wide>(k, s),
        })
    });
    let kernel = on_gpu!(kernel, |k, l| on_gpu(k, l, 1));
    let rows = if a.transposed { a.cols } else { a.rows };
    let cols = if b.transposed { b.rows } else { b.cols };
    let sizes = [
        ("rows", rows),
        ("cols", cols),
        ("a_rows", a.rows),
        ("a_cols", a.cols),
        ("b_rows", b.rows),
        ("b_cols", b.cols),
    ];
    let flags = [
        ("a_transposed", a.transposed),
        ("b_transposed", b.transposed),
        ("adds", adds),
    ];
    kernel
        .sized(sizes)
        .with_all(&flags.map(|(name, flag)| (name, Attribute::Flag(flag))))
        .costing(2.0 * (a.rows * a.cols) as f64 * cols as f64)
}

/// Launches `count` products: matrices one after another, of sizes as [`product`] says.
#[cfg(feature = "cuda")]
pub(super) fn on_gpu(k: &Kernel, l: &Operands<'_>, count: usize) -> candle_core::Result<()> {
    let factor = |name: &str, [rows, cols, transposed]: [&str; 3]| {
        let x = Matrix::several(l.x(name)?, k.count(rows)?, k.count(cols)?);
        candle_core::Result::Ok(if k.flag(transposed) { x.t() } else { x })
    };
    let a = factor("a", ["a_rows", "a_cols", "a_transposed"])?;
    let b = factor("b", ["b_rows", "b_cols", "b_transposed"])?;
    let (rows, cols) = Matrix::product_of([&a, &b]);
    let (c, adds) = (Matrix::several(l.y("c")?, rows, cols), k.flag("adds"));
    if a.view.len == 0 && !adds {
        return set_to_zero(l.gpu, c.view); // sums of nothing
    }
    let mut products = l.products.borrow_mut();
    products.multiply(l.gpu, [a, b], c, count, adds)
}
