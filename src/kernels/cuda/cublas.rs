//! Matrix products by cuBLAS, with the handle that candle has for a GPU: what eager ops multiply with.
//!
//! As candle's own product, but of matrices that lie anywhere, into a matrix that is there. The handle has room of its
//! own to work in, outside of the pool. Planned steps, whose stream is recorded, have cuBLASLt instead
//! ([`super::matmul`]).

use super::matmul::Matrix;
use super::set_to_zero;
use candle_core::cuda::gemm_reduced_precision_f32;
use candle_core::cuda_backend::cudarc::cublas::{result, sys};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{DType, Error, Result, bail};
use std::ffi::{c_int, c_void};

/// `c = a b`, or `c += a b` where it `adds`, `count` times: factors in one dtype, f32, f16 or bf16, sums in f32,
/// results in the factors' dtype or in f32. Products of f32 are exact or TF32, as candle's switch says now.
///
/// cuBLAS reads matrices column by column; a matrix that lies row by row is to it the transpose. So what is asked of it
/// is `c^T = b^T a^T`.
///
/// # Errors
/// A matrix of another dtype, or of sizes that cuBLAS does not count to; cuBLAS's.
pub(crate) fn multiply(
    gpu: &CudaDevice,
    [a, b]: [Matrix; 2],
    c: Matrix,
    count: usize,
    adds: bool,
) -> Result<()> {
    let depth = Matrix::depth_of([&a, &b], &c);
    let elements = c.rows * c.cols * count;
    if elements * depth == 0 {
        // A sum over nothing. c lies in one piece where that can be: it is the gradient of what nothing was made of.
        return match adds {
            true => Ok(()),
            false => set_to_zero(gpu, c.view.part(0, elements)),
        };
    }
    let [of_factors, of_c] = [data_type(a.view.dtype)?, data_type(c.view.dtype)?];
    let sums = match a.view.dtype {
        DType::F32 if gemm_reduced_precision_f32() => {
            sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32
        }
        _ => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
    };
    let (alpha, beta) = (1f32, if adds { 1f32 } else { 0f32 });
    gpu.cuda_stream().context().bind_to_thread().w()?;
    let blas = gpu.cublas_handle();
    // A product that is split by depth is otherwise summed in half precision where it comes out in that.
    let whole_sums = sys::cublasMath_t::CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION;
    // SAFETY: the handle lives as long as `blas`.
    let set = unsafe { sys::cublasSetMathMode(*blas.handle(), whole_sums) };
    set.result()
        .map_err(|error| Error::wrap(error).context("cuBLAS"))?;
    // SAFETY: the matrices are as they say, which their owners have made; alpha and beta are read before this returns.
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
        other => bail!("a product of {other:?}: cuBLAS is asked for f32, f16 or bf16"),
    }
}

fn int(size: usize) -> Result<c_int> {
    match c_int::try_from(size) {
        Ok(size) => Ok(size),
        Err(_) => bail!("a matrix of {size} rows or columns: cuBLAS counts to 2^31"),
    }
}
