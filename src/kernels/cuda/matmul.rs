//! Matmuls of planned steps, by cuBLASLt. a and b are f32 (exact or rounded to TF32), f16 or bf16; sums are f32; the
//! result has the dtype of a and b or f32.
//!
//! To cuBLASLt, which is column-major, a row-major matrix is its transpose. The calls are therefore `c^T = b^T a^T`.

use super::{View, set_to_zero};
use crate::kernels::workspace::CUBLASLT_WORKSPACE_BYTES;
use candle_core::cuda_backend::cudarc::cublaslt::{result, sys};
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{DType, Error, Result};
use std::collections::HashMap;
use std::ffi::c_void;
use std::ops::Range;

/// A row-major matrix in memory, or the first of several with the same shape.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    /// The buffer, from the first element on.
    pub view: View<'a>,
    /// The rows as stored, before transposition.
    pub rows: usize,
    /// The columns as stored, before transposition.
    pub cols: usize,
    /// The distance of rows, in elements.
    pub row_stride: usize,
    /// The distance of matrices, in elements.
    pub matrix_stride: usize,
    /// Whether the transpose is multiplied.
    pub transposed: bool,
}

impl<'a> Matrix<'a> {
    /// Returns a contiguous matrix.
    pub(crate) fn new(view: View<'a>, rows: usize, cols: usize) -> Self {
        Self {
            view,
            rows,
            cols,
            row_stride: cols,
            matrix_stride: 0,
            transposed: false,
        }
    }

    /// Returns the first of several contiguous matrices that follow each other.
    pub(crate) fn batched(view: View<'a>, rows: usize, cols: usize) -> Self {
        Self {
            matrix_stride: rows * cols,
            ..Self::new(view, rows, cols)
        }
    }

    /// Returns the rows and columns after transposition.
    fn operand_dims(&self) -> (usize, usize) {
        match self.transposed {
            false => (self.rows, self.cols),
            true => (self.cols, self.rows),
        }
    }

    /// Returns the depth of a matmul, the length of its sums. Asserts that the shapes match.
    pub(super) fn depth_of([a, b]: [&Self; 2], c: &Self) -> usize {
        let ((rows, depth), (inner, cols)) = (a.operand_dims(), b.operand_dims());
        assert!(
            depth == inner && (c.rows, c.cols) == (rows, cols),
            "({rows}, {depth}) by ({inner}, {cols}) into ({}, {})",
            c.rows,
            c.cols
        );
        depth
    }

    /// Returns a range of the stored rows.
    pub(crate) fn row_block(self, rows: Range<usize>) -> Self {
        self.block(rows, 0..self.cols)
    }

    /// Returns a block of the stored matrix.
    pub(crate) fn block(self, rows: Range<usize>, cols: Range<usize>) -> Self {
        let first = rows.start * self.row_stride + cols.start;
        Self {
            view: self.view.slice_from(first),
            rows: rows.len(),
            cols: cols.len(),
            ..self
        }
    }

    /// Returns the transpose.
    pub(crate) fn t(self) -> Self {
        Self {
            transposed: !self.transposed,
            ..self
        }
    }

    /// Returns the alignment of address and matrix stride, in bytes, at most 256: more makes no difference to cuBLASLt.
    fn alignment(&self) -> u32 {
        let size = self.view.dtype.size_in_bytes();
        let strides = (self.matrix_stride * size) as u64;
        1 << (self.view.pointer | strides).trailing_zeros().min(8)
    }

    fn shape(&self) -> Shape {
        Shape {
            dtype: self.view.dtype,
            dims: [self.rows, self.cols, self.row_stride, self.matrix_stride],
            transposed: self.transposed,
            alignment: self.alignment(),
        }
    }
}

/// The matmuls `d = alpha a b + beta c`, for `count` matrices.
pub(crate) struct Product<'a> {
    /// a and b.
    pub factors: [Matrix<'a>; 2],
    pub alpha: f32,
    pub beta: f32,
    /// The first element of c, which has the layout of d and may be d.
    pub c: View<'a>,
    pub d: Matrix<'a>,
    pub count: usize,
}

impl<'a> Product<'a> {
    /// Returns `c = a b`, or `c += a b` if `adds`.
    pub(crate) fn of(factors: [Matrix<'a>; 2], c: Matrix<'a>, count: usize, adds: bool) -> Self {
        Self {
            factors,
            alpha: 1.0,
            beta: if adds { 1.0 } else { 0.0 },
            c: c.view,
            d: c,
            count,
        }
    }
}

/// Writes the empty sums of matmuls of depth 0 or without elements: zeros, unless they are added to c. The matrices of
/// d must be contiguous. A c that is scaled must not be empty.
pub(super) fn write_empty_sums(gpu: &CudaDevice, product: &Product) -> Result<()> {
    let (d, count) = (product.d, product.count);
    match product.beta == 0.0 {
        true => set_to_zero(gpu, d.view.slice(0, d.rows * d.cols * count)),
        false => Ok(()),
    }
}

/// The properties of a matrix that decide about the algorithm.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Shape {
    dtype: DType,
    dims: [usize; 4],
    transposed: bool,
    alignment: u32,
}

/// The shapes of a, b and c, and the number of matrices.
type Key = ([Shape; 3], usize);

/// cuBLASLt's handle, its workspace, and the algorithm chosen for each shape. It is the first that the heuristic
/// returns, so the same matmul has the same bits in every run.
pub(crate) struct CublasLt {
    handle: sys::cublasLtHandle_t,
    workspace: CudaSlice<u8>,
    tf32: bool,
    chosen: HashMap<Key, sys::cublasLtMatmulAlgo_t>,
}

// SAFETY: the handle may be used from any thread, and `&mut` restricts it to one at a time.
unsafe impl Send for CublasLt {}
// SAFETY: as above.
unsafe impl Sync for CublasLt {}

impl CublasLt {
    /// Creates a handle on `gpu`. `tf32` decides whether f32 is multiplied in TF32 or exactly.
    pub(crate) fn new(gpu: &CudaDevice, tf32: bool) -> Result<Self> {
        gpu.cuda_stream().context().bind_to_thread().w()?;
        // Before the handle, which would leak if this failed.
        // SAFETY: it is written before it is read.
        let workspace = unsafe { gpu.alloc(CUBLASLT_WORKSPACE_BYTES)? };
        Ok(Self {
            handle: checked(result::create_handle())?,
            workspace,
            tf32,
            chosen: HashMap::new(),
        })
    }

    /// Returns whether f32 is multiplied in TF32.
    pub(crate) fn tf32(&self) -> bool {
        self.tf32
    }

    /// Computes matmuls.
    ///
    /// # Errors
    /// Errors of cuBLASLt.
    pub(crate) fn multiply(&mut self, gpu: &CudaDevice, product: Product) -> Result<()> {
        let Product {
            factors: [a, b],
            alpha,
            beta,
            d,
            count,
            ..
        } = product;
        let depth = Matrix::depth_of([&a, &b], &d);
        if d.rows * d.cols * count * depth == 0 {
            return write_empty_sums(gpu, &product);
        }
        let c = Matrix {
            view: product.c,
            ..d
        };
        let descriptor = MatmulDescriptor::new(&a, &b, &d, count, self.tf32)?;
        let mut of_d = d.shape();
        of_d.alignment = of_d.alignment.min(c.alignment());
        let key = ([a.shape(), b.shape(), of_d], count);
        let algorithm = match self.chosen.get(&key) {
            Some(algorithm) => *algorithm,
            None => {
                let alignments = key.0.each_ref().map(|shape| shape.alignment);
                let algorithm = descriptor.choose(self.handle, alignments)?;
                self.chosen.insert(key, algorithm);
                algorithm
            }
        };
        let stream = gpu.cuda_stream();
        let workspace = self.workspace.device_ptr(&stream).0;
        // SAFETY: the layouts describe the matrices, whose buffers their owners allocated; alpha and beta are read
        // before this returns; the workspace is only used in stream order.
        checked(unsafe {
            result::matmul(
                self.handle,
                descriptor.operation,
                (&raw const alpha).cast(),
                (&raw const beta).cast(),
                b.view.pointer as *const c_void,
                descriptor.layouts[0],
                a.view.pointer as *const c_void,
                descriptor.layouts[1],
                c.view.pointer as *const c_void,
                descriptor.layouts[2],
                d.view.pointer as *mut c_void,
                descriptor.layouts[2],
                &algorithm,
                workspace as *mut c_void,
                CUBLASLT_WORKSPACE_BYTES,
                stream.cu_stream() as sys::cudaStream_t,
            )
        })
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        // SAFETY: the handle belongs to this value. An error is ignored, since nothing can be done about it.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

/// A matmul in cuBLASLt's terms: the operation and the layouts of b, a and c, each of which is the transpose.
struct MatmulDescriptor {
    operation: sys::cublasLtMatmulDesc_t,
    layouts: [sys::cublasLtMatrixLayout_t; 3],
}

impl MatmulDescriptor {
    fn new(a: &Matrix, b: &Matrix, c: &Matrix, count: usize, tf32: bool) -> Result<Self> {
        let of_f32 = [a, b].iter().all(|factor| factor.view.dtype == DType::F32);
        let sums = match tf32 && of_f32 {
            true => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
            false => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
        };
        let scale = sys::cudaDataType_t::CUDA_R_32F;
        let operation = checked(result::create_matmul_desc(sums, scale))?;
        let none = std::ptr::null_mut();
        let mut descriptor = Self {
            operation,
            layouts: [none; 3],
        };
        for (matrix, layout) in [b, a, c].into_iter().zip(&mut descriptor.layouts) {
            *layout = checked(result::create_matrix_layout(
                data_type(matrix.view.dtype),
                matrix.cols as u64,
                matrix.rows as u64,
                matrix.row_stride as i64,
            ))?;
            use sys::cublasLtMatrixLayoutAttribute_t as Attribute;
            let count = count as i32;
            let stride = matrix.matrix_stride as i64;
            // SAFETY: the layout was created above; the attributes have these types.
            unsafe {
                let set = |attribute, value: *const c_void, size| {
                    checked(result::set_matrix_layout_attribute(
                        *layout, attribute, value, size,
                    ))
                };
                set(
                    Attribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT,
                    (&raw const count).cast(),
                    size_of::<i32>(),
                )?;
                set(
                    Attribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                    (&raw const stride).cast(),
                    size_of::<i64>(),
                )?;
            }
        }
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        for (attribute, matrix) in [
            (Attribute::CUBLASLT_MATMUL_DESC_TRANSA, b),
            (Attribute::CUBLASLT_MATMUL_DESC_TRANSB, a),
        ] {
            let transposed = i32::from(matrix.transposed); // CUBLAS_OP_N is 0, CUBLAS_OP_T 1
            // SAFETY: the operation was created above; the attribute has 32 bits.
            checked(unsafe {
                result::set_matmul_desc_attribute(
                    operation,
                    attribute,
                    (&raw const transposed).cast(),
                    size_of::<i32>(),
                )
            })?;
        }
        Ok(descriptor)
    }

    /// Returns the algorithm that cuBLASLt's heuristic ranks first.
    /// `alignments` are those of a, b, and c and d.
    fn choose(
        &self,
        handle: sys::cublasLtHandle_t,
        [a, b, d]: [u32; 3],
    ) -> Result<sys::cublasLtMatmulAlgo_t> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let preference = checked(result::create_matmul_pref())?;
        let set = |attribute, value: *const c_void, size| {
            // SAFETY: the preference was created above; each attribute is set with its type.
            checked(unsafe {
                result::set_matmul_pref_attribute(preference, attribute, value, size)
            })
        };
        let choose = || {
            let workspace_bytes = CUBLASLT_WORKSPACE_BYTES;
            set(
                Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                (&raw const workspace_bytes).cast(),
                size_of::<usize>(),
            )?;
            for (attribute, alignment) in [
                (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, b),
                (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, a),
                (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, d),
                (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, d),
            ] {
                set(attribute, (&raw const alignment).cast(), size_of::<u32>())?;
            }
            let [of_b, of_a, of_c] = self.layouts;
            // SAFETY: all of these were created and none was destroyed.
            checked(unsafe {
                result::get_matmul_algo_heuristic(
                    handle,
                    self.operation,
                    of_b,
                    of_a,
                    of_c,
                    of_c,
                    preference,
                )
            })
        };
        let chosen = choose();
        // SAFETY: the preference was created above. An error is ignored, since nothing can be done about it.
        let _ = unsafe { result::destroy_matmul_pref(preference) };
        Ok(chosen?.algo)
    }
}

impl Drop for MatmulDescriptor {
    fn drop(&mut self) {
        // SAFETY: each was created or is null. Errors are ignored, since nothing can be done about them.
        unsafe {
            for layout in self.layouts.into_iter().filter(|layout| !layout.is_null()) {
                let _ = result::destroy_matrix_layout(layout);
            }
            let _ = result::destroy_matmul_desc(self.operation);
        }
    }
}

fn data_type(dtype: DType) -> sys::cudaDataType_t {
    match dtype {
        DType::F16 => sys::cudaDataType_t::CUDA_R_16F,
        DType::BF16 => sys::cudaDataType_t::CUDA_R_16BF,
        _ => sys::cudaDataType_t::CUDA_R_32F,
    }
}

fn checked<T>(result: std::result::Result<T, result::CublasError>) -> Result<T> {
    result.map_err(|error| Error::wrap(error).context("cuBLASLt"))
}
