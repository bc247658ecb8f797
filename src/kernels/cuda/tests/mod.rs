//! Tests of the CUDA kernels as planned steps launch them, against f64.

mod arithmetic;
mod elementwise;
mod gradients;
mod heads;
mod losses;
mod maps;
mod matmuls;
mod newton_schulz;
mod norm;
mod reduce;
mod rows;
mod select;
mod strided;

use super::View;
use candle_core::cuda_backend::CudaDevice;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr, DeviceRepr};
use candle_core::{DType, WithDType};

fn gpu() -> CudaDevice {
    let device = crate::device("cuda:0").unwrap();
    device.as_cuda_device().unwrap().clone()
}

/// A dtype of buffer elements.
trait Element: WithDType + DeviceRepr {}
impl<T: WithDType + DeviceRepr> Element for T {}

/// Elements on each side of a buffer, which must not be written.
const GUARD: usize = 64;

/// A buffer on the GPU.
struct Buffer<T> {
    slice: CudaSlice<T>,
    first: usize,
    len: usize,
}

impl<T: Element> Buffer<T> {
    /// Creates a buffer of these values, `offset` elements after a multiple of 64.
    fn new(gpu: &CudaDevice, values: &[T], offset: usize) -> Self {
        let first = GUARD + offset;
        let mut all = vec![poison::<T>(); first + values.len() + GUARD];
        all[first..first + values.len()].copy_from_slice(values);
        Self {
            slice: gpu.clone_htod(&all).unwrap(),
            first,
            len: values.len(),
        }
    }

    /// Creates a buffer of poison, all of which the kernel must overwrite.
    fn unwritten(gpu: &CudaDevice, len: usize, offset: usize) -> Self {
        Self::new(gpu, &vec![poison::<T>(); len], offset)
    }

    fn view(&self, gpu: &CudaDevice) -> View<'_> {
        let begin = self.slice.device_ptr(&gpu.cuda_stream()).0;
        let bytes = self.first * size_of::<T>();
        View::new(begin + bytes as u64, T::DTYPE, self.len).owned_by(self)
    }

    fn read(&self, gpu: &CudaDevice) -> Vec<T> {
        let all = gpu.clone_dtoh(&self.slice).unwrap();
        let (before, rest) = all.split_at(self.first);
        let (values, after) = rest.split_at(self.len);
        for guard in [before, after] {
            let poison = poison::<T>().to_f64().to_bits();
            let touched = guard.iter().find(|x| x.to_f64().to_bits() != poison);
            assert!(
                touched.is_none(),
                "written out of bounds of {} elements",
                self.len
            );
        }
        values.to_vec()
    }
}

/// Returns the first `len` elements of a slice, for dtypes without a poison value.
fn view_of<'a, T: Element>(gpu: &CudaDevice, slice: &'a CudaSlice<T>, len: usize) -> View<'a> {
    let begin = slice.device_ptr(&gpu.cuda_stream()).0;
    View::new(begin, T::DTYPE, len).owned_by(slice)
}

/// Returns a value that marks elements that were not computed.
fn poison<T: Element>() -> T {
    match T::DTYPE {
        DType::U32 => T::from_f64(u32::MAX.into()),
        _ => T::from_f64(f64::NAN),
    }
}

/// Returns numbers between -2 and 2, rounded to T.
fn numbers<T: Element>(len: usize, seed: u64) -> Vec<T> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut draw = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f64 / (1u64 << 24) as f64
    };
    (0..len).map(|_| T::from_f64(4.0 * draw() - 2.0)).collect()
}

fn wide<T: Element>(values: &[T]) -> Vec<f64> {
    values.iter().map(|value| value.to_f64()).collect()
}

/// Asserts that the error, by norm, is at most that of rounding once and of sums in f32.
fn assert_close<T: Element>(what: &str, got: &[T], exact: &[f64]) {
    assert_eq!(got.len(), exact.len(), "{what}");
    // Half the distance between neighbours: relative, and for small numbers absolute, since f16 has few exponents.
    let (rounding, least) = match T::DTYPE {
        DType::BF16 => (2f64.powi(-8), 0.0),
        DType::F16 => (2f64.powi(-11), 2f64.powi(-25)),
        _ => (0.0, 0.0),
    };
    let of_sums = 4e-6;
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let error = norm(&mut got.iter().zip(exact).map(|(x, y)| x.to_f64() - y));
    let size = norm(&mut exact.iter().copied());
    let limit = (rounding + of_sums) * size + least * (exact.len() as f64).sqrt();
    // `<=` also fails for NaN.
    let dtype = T::DTYPE;
    assert!(error <= limit, "{what}, {dtype:?}: {error:e} off {size:e}");
}

fn bits<T: Element>(values: &[T]) -> Vec<u64> {
    values
        .iter()
        .map(|value| value.to_f64().to_bits())
        .collect()
}
