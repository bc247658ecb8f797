//! The matmul kernel of plans, for linear maps and their gradients.

use super::cpu::for_stored;
use super::lowering::{Accumulate, Kernel, MATMUL, Slices, Workspace, kernel, on_gpu};
use crate::graph::Attribute;
use crate::kernels::cpu::Stored;
use crate::kernels::cpu::gemm::{
    Batched, MatMut, MatRef, MatmulSizes, Threads, matmul_batched, matmul_to, packing_bytes,
};
use candle_core::DType;
#[cfg(feature = "cuda")]
use {
    super::lowering::Operands,
    crate::kernels::cuda::{matmul::Matrix, set_to_zero},
};

/// A factor of a [`matmul`]: its rows and columns as stored, and whether it is transposed.
#[derive(Clone, Copy)]
pub(crate) struct Factor {
    pub rows: usize,
    pub cols: usize,
    /// The stride from one row to the next, in elements.
    pub row_stride: usize,
    pub transposed: bool,
}

impl Factor {
    pub fn new(rows: usize, cols: usize) -> Self {
        Self {
            rows,
            cols,
            row_stride: cols,
            transposed: false,
        }
    }

    /// Sets the row stride, in elements.
    pub fn with_row_stride(self, row_stride: usize) -> Self {
        Self { row_stride, ..self }
    }

    pub fn t(self) -> Self {
        Self {
            transposed: !self.transposed,
            ..self
        }
    }

    /// Returns rows and columns after the transpose.
    fn sizes(&self) -> [usize; 2] {
        match self.transposed {
            false => [self.rows, self.cols],
            true => [self.cols, self.rows],
        }
    }

    fn of<'a, T: Stored>(&self, x: &'a [T]) -> MatRef<'a, T> {
        let x = MatRef::band(x, self.rows, self.cols, self.row_stride);
        if self.transposed { x.t() } else { x }
    }

    fn batched<'a, T: Stored>(&self, x: &'a [T]) -> Batched<'a, T> {
        Batched {
            data: x,
            rows: self.rows,
            cols: self.cols,
            transposed: self.transposed,
        }
    }
}

/// Returns the kernel of `c = a b`. Reads `a` and `b`; writes `c`, or adds to it. c is in the factors' dtype, or in the
/// dtype of the matmul's sums.
pub(crate) fn matmul(a: Factor, b: Factor, accumulate: Accumulate) -> Kernel {
    let [_, cols] = b.sizes();
    matmul_into(a, b, cols, accumulate)
}

/// Returns the kernel of [`matmul`] with rows of c that are `row_stride` elements apart; elements between stay
/// unchanged.
pub(crate) fn matmul_into(
    a: Factor,
    b: Factor,
    row_stride: usize,
    accumulate: Accumulate,
) -> Kernel {
    fn into<T: Stored, C: Stored<Wide = T::Wide>>(
        k: &Kernel,
        s: &Slices<'_>,
    ) -> candle_core::Result<()> {
        let ([a, b], c) = factors_of(k)?;
        let c = MatMut::band(s.y::<C>("c")?, c.rows, c.cols, c.row_stride);
        let (a, b) = (a.of(s.x::<T>("a")?), b.of(s.x::<T>("b")?));
        matmul_to(a, b, c, s.adds(k, "c"), Threads::All);
        Ok(())
    }
    let kernel = Kernel::new(MATMUL, |k, s| {
        let (read, written) = (s.dtype()?, s.dtype_of("c")?);
        for_stored!(read, T => match written == read {
            true => into::<T, T>(k, s),
            false => into::<T, <T as Stored>::Wide>(k, s),
        })
    });
    let kernel = on_gpu!(kernel, |k, l| on_gpu(k, l, 1));
    sized(kernel, a, b, row_stride, 1).summing("c", accumulate)
}

/// Returns the kernel of a batch of `count` [`matmul`]s, whose matrices are contiguous.
pub(super) fn batched(count: usize, a: Factor, b: Factor) -> Kernel {
    let kernel = kernel!(MATMUL, |T, k, s| {
        let ([a, b], _) = factors_of(k)?;
        let factors = (a.batched(s.x::<T>("a")?), b.batched(s.x("b")?));
        matmul_batched(k.count("batch")?, factors.0, factors.1, s.y("c")?);
    });
    let kernel = on_gpu!(kernel, |k, l| on_gpu(k, l, k.count("batch")?));
    let [_, cols] = b.sizes();
    sized(kernel.sized([("batch", count)]), a, b, cols, count)
}

/// Adds the parameters that [`factors_of`] reads.
fn sized(mut kernel: Kernel, a: Factor, b: Factor, row_stride: usize, count: usize) -> Kernel {
    let ([rows, depth], [_, cols]) = (a.sizes(), b.sizes());
    kernel = kernel.sized([("rows", rows), ("cols", cols), ("depth", depth)]);
    let strides = [
        (a.row_stride, a.cols),
        (b.row_stride, b.cols),
        (row_stride, cols),
    ];
    for (name, (row_stride, dense)) in ROW_STRIDES.into_iter().zip(strides) {
        if row_stride != dense {
            kernel = kernel.sized([(name, row_stride)]);
        }
    }
    let flags = [("a_transposed", a), ("b_transposed", b)];
    kernel
        .with_all(&flags.map(|(name, factor)| (name, Attribute::Flag(factor.transposed))))
        .costing(2.0 * (count * rows * depth) as f64 * cols as f64)
}

/// The parameters for row strides of a, b and c that are larger than a row.
const ROW_STRIDES: [&str; 3] = ["a_row_stride", "b_row_stride", "c_row_stride"];

/// Returns the factors of a matmul, and c.
fn factors_of(k: &Kernel) -> candle_core::Result<([Factor; 2], Factor)> {
    let [rows, cols, depth] = [k.count("rows")?, k.count("cols")?, k.count("depth")?];
    let lying = |factor: Factor, name| match k.some_count(name) {
        Some(row_stride) => factor.with_row_stride(row_stride),
        None => factor,
    };
    let factor = |rows, cols, transposed| match k.flag(transposed) {
        false => Factor::new(rows, cols),
        true => Factor::new(cols, rows).t(),
    };
    let factors = [
        lying(factor(rows, depth, "a_transposed"), ROW_STRIDES[0]),
        lying(factor(depth, cols, "b_transposed"), ROW_STRIDES[1]),
    ];
    Ok((factors, lying(Factor::new(rows, cols), ROW_STRIDES[2])))
}

/// Returns the memory for packing factors of this dtype on the CPU: for all threads together, or for a large batch, in
/// which each thread multiplies one matrix at a time, per thread.
pub(super) fn packed(kernel: &Kernel, dtype: DType) -> candle_core::Result<Workspace> {
    let sizes = MatmulSizes {
        rows: kernel.count("rows")?,
        depth: kernel.count("depth")?,
        cols: kernel.count("cols")?,
        a_transposed: kernel.flag("a_transposed"),
        b_transposed: kernel.flag("b_transposed"),
        element_bytes: dtype.size_in_bytes(),
    };
    let threads = rayon::current_num_threads();
    let bytes = match kernel.some_count("batch").unwrap_or(1) < 2 * threads {
        true => packing_bytes(sizes, Threads::All),
        false => threads as f64 * packing_bytes(sizes, Threads::One),
    };
    Ok(Workspace {
        what: "packed factors of a matmul",
        formula: "blocks of a, b and c, a thread",
        elements: bytes / 4.0,
        element_bytes: 4,
    })
}

#[cfg(feature = "cuda")]
fn on_gpu(k: &Kernel, l: &Operands<'_>, count: usize) -> candle_core::Result<()> {
    let ([a, b], c) = factors_of(k)?;
    // The stride between matrices influences the choice of an algorithm, so a single matrix has none.
    let matrix = if count == 1 {
        Matrix::new
    } else {
        Matrix::batched
    };
    let lying = |view, factor: Factor| {
        let x = Matrix {
            row_stride: factor.row_stride,
            ..matrix(view, factor.rows, factor.cols)
        };
        if factor.transposed { x.t() } else { x }
    };
    let (a, b) = (lying(l.x("a")?, a), lying(l.x("b")?, b));
    let (c, adds) = (lying(l.y("c")?, c), l.adds(k, "c"));
    if a.view.len == 0 && !adds {
        return set_to_zero(l.gpu, c.view); // empty sums
    }
    l.multiplier.multiply(l.gpu, [a, b], c, count, adds)
}
