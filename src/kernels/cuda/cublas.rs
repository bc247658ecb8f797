//! Matmuls of eager ops, by cuBLAS with candle's handle for the GPU.
//!
//! Unlike candle's matmul, operands may have any row stride, and the result is written to an existing matrix. The
//! handle has its own workspace, outside of the memory pool. Planned steps, whose stream is captured, use cuBLASLt
//! ([`super::matmul`]).

use super::copy;
use super::matmul::{Matrix, Product, write_empty_sums};
use candle_core::cuda::gemm_reduced_precision_f32;
use candle_core::cuda_backend::cudarc::cublas::{result, sys};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{DType, Error, Result, bail};
use std::ffi::{c_int, c_void};

/// Computes matmuls. a and b are both f32, f16 or bf16; sums are f32; c and d are f32 or like a. f32 is multiplied
/// exactly or in TF32, by candle's setting at the time of the call. If c is not d it is copied to d first; its matrices
/// must be contiguous.
///
/// To cuBLAS, which is column-major, a row-major matrix is its transpose. The call is therefore `c^T = b^T a^T`.
///
/// # Errors
/// Another dtype; a size of 2^31 or more; errors of cuBLAS.
pub(crate) fn multiply(gpu: &CudaDevice, product: Product) -> Result<()> {
    let Product {
        factors: [a, b],
        alpha,
        beta,
        d: c,
        count,
        ..
    } = product;
    let depth = Matrix::depth_of([&a, &b], &c);
    if c.rows * c.cols * count * depth == 0 {
        return write_empty_sums(gpu, &product);
    }
    if beta != 0.0 && product.c.pointer != c.view.pointer {
        let elements = c.rows * c.cols * count;
        let [from, to] = [product.c, c.view].map(|view| view.slice(0, elements));
        copy(gpu, from, to)?;
    }
    let [of_factors, of_c] = [data_type(a.view.dtype)?, data_type(c.view.dtype)?];
    let sums = match a.view.dtype {
        DType::F32 if gemm_reduced_precision_f32() => {
            sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32
        }
        _ => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
    };
    gpu.cuda_stream().context().bind_to_thread().w()?;
    let blas = gpu.cublas_handle();
    // Otherwise cuBLAS may sum in half precision if it splits the depth and the result is in half precision.
    let whole_sums = sys::cublasMath_t::CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION;
    // SAFETY: the handle lives as long as `blas`.
    let set = unsafe { sys::cublasSetMathMode(*blas.handle(), whole_sums) };
    set.result()
        .map_err(|error| Error::wrap(error).context("cuBLAS"))?;
    // SAFETY: the matrices describe buffers that their owners allocated; alpha and beta are read before this returns.
    let asked = unsafe {
        result::gemm_strided_batched_ex(
            *blas.handle(),
            operation(&b),
            operation(&a),
            int(c.cols)?,
            int(c.rows)?,
            int(depth)?,
            (&raw const alpha).cast(),
            b.view.pointer as *const c_void,
            of_factors,
            int(b.row_stride)?,
            b.matrix_stride as i64,
            a.view.pointer as *const c_void,
            of_factors,
            int(a.row_stride)?,
            a.matrix_stride as i64,
            (&raw const beta).cast(),
            c.view.pointer as *mut c_void,
            of_c,
            int(c.row_stride)?,
            c.matrix_stride as i64,
            int(count)?,
            sums,
            sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT_TENSOR_OP,
        )
    };
    asked.map_err(|error| Error::wrap(error).context("cuBLAS"))
}

fn operation(matrix: &Matrix) -> sys::cublasOperation_t {
    match matrix.transposed {
        false => sys::cublasOperation_t::CUBLAS_OP_N,
        true => sys::cublasOperation_t::CUBLAS_OP_T,
    }
}

fn data_type(dtype: DType) -> Result<sys::cudaDataType> {
    match dtype {
        DType::F32 => Ok(sys::cudaDataType_t::CUDA_R_32F),
        DType::F16 => Ok(sys::cudaDataType_t::CUDA_R_16F),
        DType::BF16 => Ok(sys::cudaDataType_t::CUDA_R_16BF),
        other => bail!("matmul: expected f32, f16 or bf16, got {other:?}"),
    }
}

fn int(size: usize) -> Result<c_int> {
    match c_int::try_from(size) {
        Ok(size) => Ok(size),
        Err(_) => bail!("matmul: expected sizes and strides under 2^31, got {size}"),
    }
}
