//! Checks of operands before candle or a kernel accesses them.

use crate::grad::is_grad_enabled;
use crate::{Error, Result, graph, hardware};
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, DType, Device, Layout, MetalStorage, Shape,
    Tensor, Var,
};

/// Returns whether ops compute in this dtype. candle has others (8 bits and less), which it cannot convert beyond
/// subnormal numbers.
pub(crate) fn is_supported_float(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16 | DType::F32 | DType::F64)
}

/// Returns whether comparisons and indices may be in this dtype.
pub(super) fn is_supported_integer(dtype: DType) -> bool {
    matches!(dtype, DType::U8 | DType::U32 | DType::I64)
}

pub(super) fn is_half(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16)
}

/// Refuses a dtype that is not a float.
pub(crate) fn check_float(op: &'static str, x: &Tensor) -> Result<()> {
    require(x.dtype().is_float(), op, "a floating-point tensor", x)
}

/// Refuses dtypes other than f16, bf16, f32 and f64, for ops that convert.
pub(crate) fn check_supported(op: &'static str, x: &Tensor) -> Result<()> {
    let wanted = "a floating-point tensor in f16, bf16, f32 or f64";
    require(is_supported_float(x.dtype()), op, wanted, x)
}

fn require(is_right: bool, op: &'static str, expected: &str, x: &Tensor) -> Result<()> {
    if is_right {
        return Ok(());
    }
    Err(Error::dtype(op, x.dtype().as_str()).must_be(expected, "convert with to_dtype"))
}

/// Returns `x` as `op` can read it: the number of its elements does not overflow and they would fit in memory, and an
/// empty tensor is inside its storage.
///
/// # Errors
/// More elements than can be counted or fit in memory: a broadcast view can have any number of them.
pub(crate) fn inside_storage(op: &'static str, x: &Tensor) -> Result<Tensor> {
    check_size(op, x.dims(), x.dtype(), x.device())?;
    // An empty view may begin beyond its storage, where candle's slicing panics.
    match x.elem_count() > 0 || x.is_contiguous() && x.layout().start_offset() == 0 {
        true => Ok(x.clone()),
        false => Ok(zeros_of(op, x.shape(), x.dtype(), &[x])?),
    }
}

/// Returns whether candle would sum the gradient of this broadcast view in half precision, which has too few digits.
pub(super) fn sums_in_half(x: &Tensor) -> bool {
    is_half(x.dtype()) && x.track_op() && repeated_dims(x).next().is_some()
}

/// Returns the dimensions along which a broadcast view repeats its elements.
fn repeated_dims(x: &Tensor) -> impl Iterator<Item = usize> + '_ {
    (0..x.rank()).filter(|dim| x.stride()[*dim] == 0 && x.dims()[*dim] > 1)
}

/// Returns a broadcast view with each element once: repeated dimensions become 1.
pub(super) fn without_repeats(x: &Tensor) -> Result<Tensor> {
    let mut once = x.clone();
    for dim in repeated_dims(x) {
        once = once.narrow(dim, 0, 1)?;
    }
    Ok(once)
}

/// Refuses a shape whose elements in `dtype` cannot be counted or do not fit in memory.
///
/// Dimensions of 0 count as 1: candle multiplies dimensions in any order, and no partial product may overflow.
pub(crate) fn check_size(
    op: &'static str,
    dims: &[usize],
    dtype: DType,
    device: &Device,
) -> Result<()> {
    let bytes = dims
        .iter()
        .try_fold(dtype.size_in_bytes().max(1), |bytes, dim| {
            bytes.checked_mul((*dim).max(1))
        });
    let Some(bytes) = bytes.filter(|bytes| isize::try_from(*bytes).is_ok()) else {
        return Err(Error::Shape {
            op,
            expected: "a number of elements that can be addressed".into(),
            got: format!("{dims:?} in {}", dtype.as_str()),
            hint: "use smaller dimensions".into(),
        });
    };
    if device.is_cpu() && !dims.contains(&0) && !graph::is_tracing() {
        check_fits_memory("one tensor", bytes as u64)?; // a GPU's allocations fail with an error
    }
    Ok(())
}

/// Refuses sizes beyond the machine's memory. A system that overcommits would grant them, and kill the process when the
/// memory is written.
pub(crate) fn check_fits_memory(what: &str, wanted_bytes: u64) -> Result<()> {
    hardware::check_available(what, wanted_bytes, hardware::total_bytes())
}

/// Allocations below this size are not checked: a page-sized block is hardly ever refused, and reporting an error would
/// need one too.
const SMALL_BYTES: u64 = 1 << 16;

/// Refuses `wanted_bytes` of host memory that the allocator does not grant now. It is called before code that aborts
/// the process if its allocation fails, such as candle and the gemm crate. Another thread may allocate the memory in
/// between.
///
/// # Errors
/// [`Error::OutOfMemory`].
pub(crate) fn check_granted(what: &str, wanted_bytes: u64) -> Result<()> {
    if wanted_bytes < SMALL_BYTES {
        return Ok(());
    }
    let mut block = Vec::<u8>::new();
    let bytes = usize::try_from(wanted_bytes).unwrap_or(usize::MAX);
    let granted = block.try_reserve_exact(bytes);
    std::hint::black_box(&mut block); // or the compiler leaves the allocation out
    granted.map_err(|_| hardware::not_granted(what, wanted_bytes))
}

/// Runs [`check_granted`] for a tensor on `device`. A GPU's allocations fail with an error and are not checked.
pub(crate) fn check_granted_on(device: &Device, dims: &[usize], dtype: DType) -> Result<()> {
    if !device.is_cpu() || graph::is_tracing() {
        return Ok(());
    }
    let elements = dims.iter().fold(1, |n: usize, dim| n.saturating_mul(*dim));
    let bytes = elements.saturating_mul(dtype.size_in_bytes());
    check_granted("one tensor", bytes as u64)
}

/// Returns zeros on `device`; an error if there is no memory for them.
pub(crate) fn zeros(shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Tensor> {
    let shape = shape.into();
    check_granted_on(device, shape.dims(), dtype)?;
    Ok(Tensor::zeros(shape, dtype, device)?)
}

/// Returns `x` contiguous; an error if there is no memory for a copy.
pub(crate) fn try_contiguous(x: &Tensor) -> Result<Tensor> {
    if !x.is_contiguous() {
        check_granted_on(x.device(), x.dims(), x.dtype())?;
    }
    Ok(x.contiguous()?)
}

/// Returns the variable that `x` is, or a new one with a copy of its elements; an error if there is no memory for it.
pub(crate) fn variable_of(x: &Tensor) -> Result<Var> {
    if !x.is_variable() {
        check_granted_on(x.device(), x.dims(), x.dtype())?;
    }
    Ok(Var::from_tensor(x)?)
}

/// Returns zeros, possibly none, that depend on all `operands`: each gets zeros as its gradient. It is for results
/// without elements and for empty sums; candle's own ops make these depend on the first operand only, or on none.
pub(super) fn zeros_of(
    op: &'static str,
    shape: impl Into<Shape>,
    dtype: DType,
    operands: &[&Tensor],
) -> candle_core::Result<Tensor> {
    let shape = shape.into();
    let zeros = || ZerosOf {
        op,
        shape: shape.clone(),
        dtype,
    };
    let Some((first, others)) = operands.split_first() else {
        return Tensor::zeros(&shape, dtype, &Device::Cpu);
    };
    if !is_grad_enabled() {
        return first.apply_op1_no_bwd(&zeros());
    }
    let y = first.apply_op1(zeros())?;
    let mut tracked = others.iter().filter(|x| x.track_op());
    tracked.try_fold(y, |y, x| y.apply_op2(x, zeros()))
}

struct ZerosOf {
    op: &'static str,
    shape: Shape,
    dtype: DType,
}

impl ZerosOf {
    fn zeros_like_device<S>(&self, storage: &S) -> candle_core::Result<(S, Shape)>
    where
        S: BackendStorage<Device: BackendDevice<Storage = S>>,
    {
        let none = storage.device().zeros_impl(&self.shape, self.dtype)?;
        Ok((none, self.shape.clone()))
    }
}

impl CustomOp1 for ZerosOf {
    fn name(&self) -> &'static str {
        self.op
    }

    fn cpu_fwd(&self, x: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        self.zeros_like_device(x)
    }

    fn cuda_fwd(&self, x: &CudaStorage, _: &Layout) -> candle_core::Result<(CudaStorage, Shape)> {
        self.zeros_like_device(x)
    }

    fn metal_fwd(
        &self,
        x: &MetalStorage,
        _: &Layout,
    ) -> candle_core::Result<(MetalStorage, Shape)> {
        self.zeros_like_device(x)
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, _: &Tensor) -> candle_core::Result<Option<Tensor>> {
        x.zeros_like().map(Some)
    }
}

impl CustomOp2 for ZerosOf {
    fn name(&self) -> &'static str {
        self.op
    }

    fn cpu_fwd(
        &self,
        a: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        self.zeros_like_device(a)
    }

    fn cuda_fwd(
        &self,
        a: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> candle_core::Result<(CudaStorage, Shape)> {
        self.zeros_like_device(a)
    }

    fn metal_fwd(
        &self,
        a: &MetalStorage,
        _: &Layout,
        _: &MetalStorage,
        _: &Layout,
    ) -> candle_core::Result<(MetalStorage, Shape)> {
        self.zeros_like_device(a)
    }

    fn bwd(
        &self,
        a: &Tensor,
        b: &Tensor,
        _: &Tensor,
        _: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>)> {
        Ok((Some(a.zeros_like()?), Some(b.zeros_like()?)))
    }
}
