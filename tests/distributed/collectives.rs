//! Tests of the collectives, with ranks that are processes.

use super::{at_most, join, succeed};
use candle_core::{DType, Device, Tensor};
use rstest::rstest;
use tallow::Result;
use tallow::distributed::Reduce;

#[rstest]
#[cfg_attr(feature = "cuda", ignore = "needs two CUDA devices")]
fn on_processes(#[values(1, 2, 3, 5)] ranks: usize) {
    succeed("collectives", at_most(ranks));
}

/// Runs the collectives in every dtype; each rank checks its results.
pub fn of_every_dtype() -> Result<()> {
    let ranks = join(60)?;
    let device = ranks.device();
    let (rank, world_size) = (ranks.rank(), ranks.world_size());
    let n = world_size as f64;
    let dtypes = [DType::F64, DType::F32, DType::BF16, DType::F16];
    // Candle's own kernels refuse empty tensors on a GPU.
    let fewest = if device.is_cpu() { 0 } else { 1 };
    let counts = [fewest, 1, 7, 100_003];
    let cases = dtypes
        .into_iter()
        .flat_map(|dtype| counts.map(|n| (dtype, n)));
    for (dtype, elements) in cases {
        // Small integers and their sums are exact in each dtype.
        let numbers = |factor: f64| (0..elements).map(move |i| factor * (i % 5 + 1) as f64);
        let of = |factor: f64| {
            let x = Tensor::from_vec(numbers(factor).collect(), elements, &Device::Cpu)?;
            x.to_dtype(dtype)?.to_device(device)
        };
        let read = |x: &Tensor| {
            let x = x.to_device(&Device::Cpu)?.to_dtype(DType::F64)?;
            x.to_vec1::<f64>()
        };
        let own = (rank + 1) as f64;
        for (reduce, factor) in [
            (Reduce::Sum, n * (n + 1.0) / 2.0),
            (Reduce::Mean, (n + 1.0) / 2.0),
            (Reduce::Max, n),
        ] {
            let x = of(own)?;
            ranks.all_reduce(&x, reduce)?;
            assert!(
                read(&x)?.into_iter().eq(numbers(factor)),
                "{dtype:?} {reduce:?}"
            );
            let x = of(own)?;
            ranks.reduce(&x, reduce, world_size - 1)?;
            assert!(
                rank + 1 < world_size || read(&x)?.into_iter().eq(numbers(factor)),
                "{dtype:?} {reduce:?}"
            );
        }
        if elements > 0 {
            let all = ranks.all_gather(&of(own)?)?;
            let gathered = (1..=world_size).flat_map(|rank| numbers(rank as f64));
            assert!(read(&all)?.into_iter().eq(gathered), "{dtype:?}");
            let part = ranks.reduce_scatter(&all, Reduce::Mean)?;
            assert!(read(&part)?.into_iter().eq(numbers(own)), "{dtype:?}");
            let x = of(own)?;
            ranks.broadcast(&x, world_size - 1)?;
            assert!(read(&x)?.into_iter().eq(numbers(n)), "{dtype:?}");
        }
    }
    ranks.barrier()
}
