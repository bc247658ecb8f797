//! Collectives by MPI.

use super::{at_most, join, succeed};
use candle_core::{DType, Tensor};
use rstest::rstest;
use tallow::Result;
use tallow::dist::Reduce;

#[rstest]
#[cfg_attr(feature = "cuda", ignore = "needs two CUDA devices")]
fn on_processes(#[values(1, 2, 3, 5)] ranks: usize) {
    succeed("collectives", at_most(ranks));
}

/// Every rank checks what it gets.
pub fn of_every_dtype() -> Result<()> {
    let ranks = join(60)?;
    let device = ranks.device();
    let (rank, world_size) = (ranks.rank(), ranks.world_size());
    let n = world_size as f64;
    let dtypes = [DType::F64, DType::F32, DType::BF16, DType::F16];
    // A sum of a hundred thousand small integers is exact in each.
    for (dtype, elements) in dtypes
        .into_iter()
        .flat_map(|d| [0, 1, 7, 100_003].map(|n| (d, n)))
    {
        let of = |rank: usize| {
            let x = (0..elements).map(move |i| ((rank + 1) * (i % 5 + 1)) as f64);
            let x: Vec<f64> = x.collect();
            Tensor::from_vec(x, elements, device)?.to_dtype(dtype)
        };
        for (reduce, factor) in [
            (Reduce::Sum, n * (n + 1.0) / 2.0),
            (Reduce::Mean, (n + 1.0) / 2.0),
            (Reduce::Max, n),
        ] {
            let x = of(rank)?;
            ranks.all_reduce(&x, reduce)?;
            let wanted = (of(0)?.to_dtype(DType::F64)? * factor)?.to_dtype(dtype)?;
            let equal = x.eq(&wanted)?.to_dtype(DType::U32)?.to_vec1::<u32>()?;
            assert!(
                equal.iter().all(|equal| *equal == 1),
                "{dtype:?} {reduce:?}"
            );
        }
        if elements > 0 {
            let all = ranks.all_gather(&of(rank)?)?;
            let part = ranks.reduce_scatter(&all, Reduce::Mean)?;
            assert_eq!(part.to_dtype(DType::F64)?.to_vec1::<f64>()?, {
                of(rank)?.to_dtype(DType::F64)?.to_vec1::<f64>()?
            });
            let x = of(rank)?;
            ranks.broadcast(&x, world_size - 1)?;
            let wanted = of(world_size - 1)?.to_dtype(DType::F64)?;
            assert_eq!(
                x.to_dtype(DType::F64)?.to_vec1::<f64>()?,
                wanted.to_vec1::<f64>()?
            );
        }
    }
    // Around the ring: even ranks send first.
    if world_size > 1 {
        let (next, before) = (
            (rank + 1) % world_size,
            (rank + world_size - 1) % world_size,
        );
        let own = Tensor::new(&[rank as i64], device)?;
        let got = own.zeros_like()?;
        match rank % 2 {
            0 => {
                ranks.send(&own, next)?;
                ranks.receive(&got, before)?;
            }
            _ => {
                ranks.receive(&got, before)?;
                ranks.send(&own, next)?;
            }
        }
        assert_eq!(got.to_vec1::<i64>()?, [before as i64]);
    }
    ranks.barrier()
}
