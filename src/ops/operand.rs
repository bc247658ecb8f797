//! What every op asks of its operands before candle or a kernel touches them.

use crate::grad::is_grad_enabled;
use crate::{Error, Result, graph, hardware};
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, DType, Device, Layout, MetalStorage, Shape,
    Tensor, Var,
};

/// The floating-point dtypes that ops compute with. candle has others (8 bits and less), whose conversion does not end
/// at subnormal numbers.
pub(crate) fn is_supported_float(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16 | DType::F32 | DType::F64)
}

pub(super) fn is_half(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16)
}

/// Refuses what is not a float.
pub(crate) fn check_float(op: &'static str, x: &Tensor) -> Result<()> {
    refuse_unless(x.dtype().is_float(), op, "a floating-point tensor", x)
}

/// Refuses what is not f16, bf16, f32 or f64, for ops that convert.
pub(crate) fn check_supported(op: &'static str, x: &Tensor) -> Result<()> {
    let wanted = "a floating-point tensor in f16, bf16, f32 or f64";
    refuse_unless(is_supported_float(x.dtype()), op, wanted, x)
}

fn refuse_unless(is_right: bool, op: &'static str, expected: &str, x: &Tensor) -> Result<()> {
    if is_right {
        return Ok(());
    }
    Err(Error::dtype(op, x.dtype().as_str()).must_be(expected, "convert with to_dtype"))
}

/// `x` as `op` can read it: its elements can be counted and would fit into memory, one by one, and if there are none,
/// it lies inside of its storage.
///
/// # Errors
/// More elements than can be counted, or than the machine has memory for: a broadcast view can have any number of them.
pub(crate) fn inside_storage(op: &'static str, x: &Tensor) -> Result<Tensor> {
    check_size(op, x.dims(), x.dtype(), x.device())?;
    // A view of nothing may begin beyond its storage, where candle's slices panic.
    match x.elem_count() > 0 || x.is_contiguous() && x.layout().start_offset() == 0 {
        true => Ok(x.clone()),
        false => Ok(zeros_of(op, x.shape(), x.dtype(), &[x])?),
    }
}

/// Whether candle would sum the gradient of this broadcast view in half precision, and run out of digits.
pub(super) fn sums_in_half(x: &Tensor) -> bool {
    is_half(x.dtype()) && x.track_op() && repeated_dims(x).next().is_some()
}

/// Dimensions along which a broadcast view repeats its elements.
fn repeated_dims(x: &Tensor) -> impl Iterator<Item = usize> + '_ {
    (0..x.rank()).filter(|dim| x.stride()[*dim] == 0 && x.dims()[*dim] > 1)
}

/// A broadcast view with each element once: repeated dimensions are 1.
pub(super) fn without_repeats(x: &Tensor) -> Result<Tensor> {
    let mut once = x.clone();
    for dim in repeated_dims(x) {
        once = once.narrow(dim, 0, 1)?;
    }
    Ok(once)
}

/// Refuses a shape whose elements, each in `dtype`, cannot be counted or fit no memory.
///
/// Dimensions of 0 count as 1: candle multiplies them in any order, and must not overflow on the way.
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
        check_room("one tensor", bytes as u64)?; // a GPU's allocations fail with an error
    }
    Ok(())
}

/// Refuses what the machine has not the memory for. A system that overcommits would grant it, and kill the process when
/// it is written.
pub(crate) fn check_room(what: &str, wanted_bytes: u64) -> Result<()> {
    hardware::check_available(what, wanted_bytes, hardware::total_bytes())
}

/// What is allocated without asking: a page-sized block is hardly ever refused, and an error could not be reported
/// without it.
const SMALL_BYTES: u64 = 1 << 16;

/// Refuses `wanted_bytes` of host memory that the allocator does not grant at present: for what is allocated next by
/// code that aborts the process where its allocation fails, as candle's and the gemm crate's does. Another thread may
/// take the memory in between.
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

/// As [`check_granted`], for a tensor that is made on `device`: a GPU's allocations fail with an error.
pub(crate) fn check_granted_on(device: &Device, dims: &[usize], dtype: DType) -> Result<()> {
    if !device.is_cpu() || graph::is_tracing() {
        return Ok(());
    }
    let elements = dims.iter().fold(1, |n: usize, dim| n.saturating_mul(*dim));
    let bytes = elements.saturating_mul(dtype.size_in_bytes());
    check_granted("one tensor", bytes as u64)
}

/// Zeros on `device`, or the error that there is no memory for them.
pub(crate) fn zeros(shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Tensor> {
    let shape = shape.into();
    check_granted_on(device, shape.dims(), dtype)?;
    Ok(Tensor::zeros(shape, dtype, device)?)
}

/// `x` contiguous, or the error that there is no memory for the copy.
pub(crate) fn laid_out(x: &Tensor) -> Result<Tensor> {
    if !x.is_contiguous() {
        check_granted_on(x.device(), x.dims(), x.dtype())?;
    }
    Ok(x.contiguous()?)
}

/// The variable that `x` is, or a new one with a copy of its elements, or the error that there is no memory for it.
pub(crate) fn variable_of(x: &Tensor) -> Result<Var> {
    if !x.is_variable() {
        check_granted_on(x.device(), x.dims(), x.dtype())?;
    }
    Ok(Var::from_tensor(x)?)
}

/// Zeros, perhaps none, that depend on `operands` all the same: each gets zeros as its gradient. For results without
/// elements and sums of nothing, which in candle's own ops depend on the first operand alone, or on none.
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
    fn beside<S>(&self, storage: &S) -> candle_core::Result<(S, Shape)>
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
        self.beside(x)
    }

    fn cuda_fwd(&self, x: &CudaStorage, _: &Layout) -> candle_core::Result<(CudaStorage, Shape)> {
        self.beside(x)
    }

    fn metal_fwd(
        &self,
        x: &MetalStorage,
        _: &Layout,
    ) -> candle_core::Result<(MetalStorage, Shape)> {
        self.beside(x)
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
        self.beside(a)
    }

    fn cuda_fwd(
        &self,
        a: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> candle_core::Result<(CudaStorage, Shape)> {
        self.beside(a)
    }

    fn metal_fwd(
        &self,
        a: &MetalStorage,
        _: &Layout,
        _: &MetalStorage,
        _: &Layout,
    ) -> candle_core::Result<(MetalStorage, Shape)> {
        self.beside(a)
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
