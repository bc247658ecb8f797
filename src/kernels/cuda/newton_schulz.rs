//! Muon's iteration: matrices of one shape are made nearly orthogonal by batched matmuls; see `newton_schulz.cu`.
//!
//! A step is three matmuls. Their alpha and beta are the coefficients of the polynomial:
//!
//! ```text
//! A = X X^T;  B = c A A + b A;  X = B X + a X
//! ```
//!
//! The caller passes the matmul: cuBLAS for eager steps ([`super::cublas`]), cuBLASLt for planned ones
//! ([`super::matmul`]).

use super::cast::cast;
use super::matmul::{Matrix, Product};
use super::source::{PRELUDE, Source};
use super::{View, launch_config, suffix};
use crate::kernels::cpu::update::muon::{COEFFICIENTS_OF_A_STEP, Iteration};
use crate::kernels::workspace;
use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::PushKernelArg;
use candle_core::cuda_backend::{CudaDevice, WrapErr};

const SOURCE: Source = Source {
    name: "newton_schulz",
    parts: &[PRELUDE, include_str!("newton_schulz.cu")],
};

/// The matrices, one after another in f32, and the scratch memory of [`Iteration::scratch`].
pub(crate) struct Buffers<'a> {
    pub directions: View<'a>,
    pub x: Option<View<'a>>,
    pub next: View<'a>,
    pub gram: View<'a>,
    pub square: View<'a>,
    pub sums: View<'a>,
}

/// Compiles and loads the kernels.
pub(crate) fn prepare(gpu: &CudaDevice) -> Result<()> {
    SOURCE.kernel(gpu, "squares", "").map(drop)
}

/// Makes the matrices nearly orthogonal, in place. `multiply` computes a matmul.
pub(crate) fn orthogonalize(
    gpu: &CudaDevice,
    iteration: &Iteration,
    buffers: &Buffers<'_>,
    multiply: impl Fn(Product<'_>) -> Result<()>,
) -> Result<()> {
    let (directions, n) = (buffers.directions, iteration.elements());
    if directions.len == 0 {
        return Ok(());
    }
    let count = directions.len / n;
    // Each step writes the other of two buffers. The last one writes the first.
    let first = buffers.x.unwrap_or(directions);
    let [mut x, mut next] = match iteration.steps.is_multiple_of(2) {
        true => [first, buffers.next],
        false => [buffers.next, first],
    };
    normalize(gpu, iteration, buffers, x)?;
    let ([rows, columns], side) = (iteration.shape, iteration.side());
    let [a, b, c] = COEFFICIENTS_OF_A_STEP.map(|coefficient| coefficient as f32);
    let [gram, square] = [buffers.gram, buffers.square];
    let [by_gram, by_square] = [gram, square].map(|view| Matrix::batched(view, side, side));
    for _ in 0..iteration.steps {
        let matrix = Matrix::batched(x, rows, columns);
        let (factors, applied) = match iteration.is_tall() {
            true => ([matrix.t(), matrix], [matrix, by_square]),
            false => ([matrix, matrix.t()], [by_square, matrix]),
        };
        multiply(Product {
            factors,
            alpha: 1.0,
            beta: 0.0,
            c: gram,
            d: by_gram,
            count,
        })?;
        multiply(Product {
            factors: [by_gram, by_gram],
            alpha: c,
            beta: b,
            c: gram,
            d: by_square,
            count,
        })?;
        multiply(Product {
            factors: applied,
            alpha: 1.0,
            beta: a,
            c: x,
            d: Matrix::batched(next, rows, columns),
            count,
        })?;
        std::mem::swap(&mut x, &mut next);
    }
    match buffers.x {
        Some(x) => cast(gpu, x, directions),
        None => Ok(()),
    }
}

/// Divides each matrix by its norm plus eps, to `x` in f32 or bf16.
fn normalize(
    gpu: &CudaDevice,
    iteration: &Iteration,
    buffers: &Buffers<'_>,
    x: View<'_>,
) -> Result<()> {
    let (directions, sums, n) = (buffers.directions, buffers.sums, iteration.elements());
    let chunks = workspace::chunks(n);
    let config = launch_config((directions.len / n * chunks, 1), (256, 1));
    let (elements, chunks) = (n as i64, chunks as i32);
    let kernel = SOURCE.kernel(gpu, "squares", "")?;
    let mut launch = kernel.builder();
    launch.arg(&directions.pointer).arg(&elements).arg(&chunks);
    launch.arg(&sums.pointer);
    // SAFETY: the arguments are those of the kernel, and the buffers have the sizes that it expects.
    unsafe { launch.launch(config) }.w()?;
    let kernel = SOURCE.kernel(gpu, "normalize", suffix(x.dtype))?;
    let mut launch = kernel.builder();
    launch.arg(&directions.pointer).arg(&x.pointer);
    launch.arg(&elements).arg(&chunks);
    launch.arg(&sums.pointer).arg(&iteration.eps);
    // SAFETY: as above.
    unsafe { launch.launch(config) }.w()?;
    Ok(())
}
