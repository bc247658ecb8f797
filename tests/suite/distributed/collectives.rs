//! Collectives on tensors.

use super::on_ranks;
use crate::check::elements;
use candle_core::{DType, Device, Tensor};
use half::bf16;
use rstest::rstest;
use tallow::distributed::{Communicator, Reduce};
use tallow::{Error, Result};

const CPU: Device = Device::Cpu;

/// Returns r + 1, 2 (r + 1), ... for rank r.
fn of_rank(rank: usize, elements: usize, dtype: DType) -> Result<Tensor> {
    let x = (0..elements).map(|i| ((rank + 1) * (i + 1)) as f32);
    Ok(Tensor::from_iter(x, &CPU)?.to_dtype(dtype)?)
}

#[rstest]
fn reduced_on_all(
    #[values(1, 2, 3, 5)] world_size: usize,
    #[values(DType::F64, DType::F32, DType::BF16, DType::F16)] dtype: DType,
) {
    let reduced = on_ranks(world_size, |ranks| {
        let reduced = [Reduce::Sum, Reduce::Mean, Reduce::Max].map(|reduce| {
            let x = of_rank(ranks.rank(), 7, dtype)?;
            ranks.all_reduce(&x, reduce)?;
            Ok(elements(&x))
        });
        reduced.into_iter().collect::<Result<Vec<_>>>()
    });
    let n = world_size as f64;
    let each = |factor: f64| (1..=7).map(|i| factor * f64::from(i)).collect::<Vec<_>>();
    let wanted = [each(n * (n + 1.0) / 2.0), each((n + 1.0) / 2.0), each(n)];
    assert!(
        reduced.iter().all(|reduced| *reduced == wanted),
        "{reduced:?}"
    );
}

#[test]
fn parts_and_wholes() {
    let made = on_ranks(3, |ranks| {
        let rank = ranks.rank();
        let x = of_rank(rank, 12, DType::F32)?.reshape((6, 2))?;
        let part = ranks.reduce_scatter(&x, Reduce::Sum)?;
        assert_eq!(part.dims(), [2, 2]);
        let all = ranks.all_gather(&part)?;
        assert_eq!(all.dims(), [6, 2]);
        let ids = Tensor::new(&[rank as u32, 7], &CPU)?;
        ranks.broadcast(&ids, 2)?;
        assert_eq!(ids.to_vec1::<u32>()?, [2, 7]);
        assert_eq!(elements(&x), elements(&of_rank(rank, 12, DType::F32)?)); // unchanged
        Ok(elements(&all))
    });
    let wanted: Vec<f64> = (1..=12).map(|i| f64::from(6 * i)).collect();
    assert_eq!(made, [wanted.clone(), wanted.clone(), wanted]);
}

#[test]
fn from_one_to_another() {
    on_ranks(2, |ranks| {
        let x = of_rank(ranks.rank(), 5, DType::BF16)?;
        ranks.broadcast(&x, 0)?;
        let x = x.to_vec1::<bf16>()?;
        assert_eq!(x.map_to_f32(), [1.0, 2.0, 3.0, 4.0, 5.0]);
        ranks.barrier()?;
        assert_eq!(ranks.mean(&[ranks.rank() as f64, 3.0])?, [0.5, 3.0]);
        Ok(())
    });
}

trait ToF32 {
    fn map_to_f32(self) -> Vec<f32>;
}

impl ToF32 for Vec<bf16> {
    fn map_to_f32(self) -> Vec<f32> {
        self.into_iter().map(f32::from).collect()
    }
}

#[test]
fn what_is_refused() {
    let ranks = Communicator::single_rank(&CPU);
    let x = Tensor::zeros((4, 3), DType::F32, &CPU).unwrap();
    let refused = |error: Result<()>| error.unwrap_err().to_string();
    assert!(refused(ranks.all_reduce(&x.t().unwrap(), Reduce::Sum)).contains("contiguous"));
    let i16s = Tensor::zeros(4, DType::I16, &CPU).unwrap();
    assert!(refused(ranks.all_reduce(&i16s, Reduce::Sum)).contains("to_dtype"));
    assert!(refused(ranks.broadcast(&x, 1)).contains("root must be under the number of ranks, 1"));
    assert!(refused(ranks.broadcast(&x, 4)).contains("ranks count from 0"));
    let scalar = x.sum_all().unwrap();
    assert!(refused(ranks.all_gather(&scalar).map(drop)).contains("a scalar"));
    let errors = on_ranks(2, |ranks| {
        let x = Tensor::zeros((3, 2), DType::F32, &CPU)?;
        Ok(refused(ranks.reduce_scatter(&x, Reduce::Sum).map(drop)))
    });
    assert!(
        errors
            .iter()
            .all(|error| error.contains("rows that 2 ranks divide"))
    );
}

/// If ranks run different operations, both get an error that names a rank.
#[test]
fn not_the_same() {
    let errors = on_ranks(2, |ranks| {
        let x = of_rank(0, 3 + ranks.rank(), DType::F32)?;
        Ok(ranks.all_reduce(&x, Reduce::Sum).unwrap_err())
    });
    for error in errors {
        assert!(matches!(error, Error::Rank { rank: 1, .. }), "{error}");
    }
}

/// If facts differ, every rank gets an error with the first rank that differs from rank 0. A missing rank is named too.
#[test]
fn facts_are_compared() {
    let errors = on_ranks(3, |ranks| {
        let same = [("model", "tiny".into()), ("seed", "1".into())];
        for _ in 0..3 {
            ranks.check_equal("the run", &same)?;
        }
        let batch_size = "1".repeat(1 + ranks.rank() / 2);
        let other = [("model", "tiny".into()), ("batch size", batch_size)];
        let error = ranks.check_equal("the run", &other).unwrap_err();
        let later = ranks.barrier().unwrap_err();
        Ok([error, later])
    });
    for error in errors.into_iter().flatten() {
        assert!(matches!(error, Error::Rank { rank: 2, .. }), "{error}");
        let words = "rank 2, in the run: batch size is 11, and 1 on rank 0";
        assert!(error.to_string().contains(words), "{error}");
    }
    let ended = on_ranks(2, |ranks| match ranks.rank() {
        0 => Ok(ranks.check_equal("the run", &[]).err()),
        _ => Ok(None),
    });
    let error = ended[0].as_ref().unwrap();
    assert!(matches!(error, Error::Rank { rank: 1, .. }), "{error}");
}
