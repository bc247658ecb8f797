use super::*;
use crate::distributed::collective::Reduce;
use crate::kernels::cpu::{Real, Stored};
use candle_core::WithDType;
use half::{bf16, f16};
use rstest::rstest;
use std::thread;
use std::time::Instant;

/// Runs each rank's call on its buffer; returns the buffers.
fn together<T: WithDType>(
    buffers: Vec<Vec<T>>,
    call: impl Fn(usize) -> Collective + Sync,
) -> Vec<Result<Vec<T>>> {
    let call = &call;
    thread::scope(|scope| {
        let ranks = group(buffers.len()).into_iter().zip(buffers);
        let ranks = ranks.map(|(mut backend, mut buffer)| {
            scope.spawn(move || {
                let collective = call(backend.place.rank);
                run(&mut backend, collective, &mut buffer)?;
                Ok(buffer)
            })
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn run<T: WithDType>(
    backend: &mut ThreadBackend,
    collective: Collective,
    buffer: &mut [T],
) -> Result<()> {
    backend.run(collective, HostBuffer::of(buffer), &patience(5000))
}

/// Returns a check that fails after some milliseconds.
fn patience(milliseconds: u64) -> impl Fn() -> Result<()> {
    let began = Instant::now();
    move || match began.elapsed().as_millis() as u64 >= milliseconds {
        true => Err(Error::Plot("too late".into())),
        false => Ok(()),
    }
}

/// Tests every collective on buffers in which rank `r` has `number(r, i)`; `reduced` computes the expected reduction.
fn every<T: WithDType + fmt::Debug>(
    number: impl Fn(usize, usize) -> T,
    reduces: &[Reduce],
    reduced: impl Fn(Reduce, Vec<T>) -> T,
) {
    for world_size in [1, 2, 3, 5] {
        for part in [0, 1, 7, 1001] {
            let elements = part * world_size;
            let buffers = |elements| -> Vec<Vec<T>> {
                let buffer = |rank| (0..elements).map(|i| number(rank, i)).collect();
                (0..world_size).map(buffer).collect()
            };
            for reduce in reduces {
                let at = |i| reduced(*reduce, (0..world_size).map(|r| number(r, i)).collect());
                let odd = elements + world_size / 2;
                for got in together(buffers(odd), |_| Collective::AllReduce(*reduce)) {
                    assert!(got.unwrap().into_iter().eq((0..odd).map(at)));
                }
                let scatter = |_| Collective::ReduceScatter(*reduce);
                let scattered = together(buffers(elements), scatter);
                for (rank, got) in scattered.into_iter().enumerate() {
                    let range = rank * part..(rank + 1) * part;
                    let got = &got.unwrap()[range.clone()];
                    assert!(got.iter().copied().eq(range.map(at)));
                }
            }
            for got in together(buffers(elements), |_| Collective::AllGather) {
                let want = (0..elements).map(|i| number(i / part, i));
                assert!(got.unwrap().into_iter().eq(want));
            }
            let root = world_size / 2;
            for got in together(buffers(elements), |_| Collective::Broadcast { root }) {
                assert_eq!(got.unwrap(), buffers(elements)[root]);
            }
        }
    }
}

fn every_float<T: Stored + WithDType + fmt::Debug>() {
    let reduced = |reduce, numbers: Vec<T>| {
        let wide = numbers.into_iter().map(|x| {
            let mut wide = [T::Wide::ZERO];
            T::load(&[x], &mut wide);
            wide[0]
        });
        let sum = |sum: T::Wide, x| sum + x;
        let n = T::Wide::real(wide.len() as f64);
        let reduced = match reduce {
            Reduce::Sum => wide.reduce(sum),
            Reduce::Mean => wide.reduce(sum).map(|sum| sum / n),
            Reduce::Max => wide.reduce(T::Wide::larger),
        };
        let mut rounded = [T::from_f64(0.0)];
        T::store(&[reduced.unwrap()], &mut rounded);
        rounded[0]
    };
    let wave = |rank, i| T::from_f64(((rank * 1009 + i) as f64 * 0.37).sin());
    let reduces = [Reduce::Sum, Reduce::Mean, Reduce::Max];
    every::<T>(wave, &reduces, reduced);
}

#[test]
fn every_collective_of_every_dtype() {
    every_float::<f64>();
    every_float::<f32>();
    every_float::<f16>();
    every_float::<bf16>();
    let number = |rank, i| rank * 91 + i;
    every(|rank, i| number(rank, i) as u8, &[], |_, _| 0);
    every(|rank, i| number(rank, i) as u32, &[], |_, _| 0);
    every(|rank, i| -(number(rank, i) as i64), &[], |_, _| 0);
}

#[test]
fn ranks_are_added_in_order_and_halves_rounded_once() {
    for _ in 0..20 {
        // (1 + 1e8) - 1e8 is 0 in f32; any other order gives 1.
        let buffers = vec![vec![1f32], vec![1e8], vec![-1e8]];
        for got in together(buffers, |_| Collective::AllReduce(Reduce::Sum)) {
            assert_eq!(got.unwrap(), [0.0]);
        }
        // In bf16, 256 + 1 is 256.
        let buffers = [256.0, 1.0, 1.0].map(|x| vec![bf16::from_f32(x)]);
        let sum = |_| Collective::AllReduce(Reduce::Sum);
        for got in together(buffers.to_vec(), sum) {
            assert_eq!(got.unwrap(), [bf16::from_f32(258.0)]);
        }
    }
}

#[test]
fn the_largest_leaves_out_nan() {
    for place in 0..3 {
        let mut buffers = vec![vec![1f32], vec![2.0], vec![3.0]];
        buffers[place] = vec![f32::NAN];
        let largest = if place == 2 { 2.0 } else { 3.0 };
        for got in together(buffers, |_| Collective::AllReduce(Reduce::Max)) {
            assert_eq!(got.unwrap(), [largest]);
        }
    }
}

fn assert_all_say<T: fmt::Debug>(results: Vec<Result<T>>, words: &str) {
    for result in results {
        let text = result.unwrap_err().to_string();
        assert!(text.contains(words), "{text}");
    }
}

const SUM: Collective = Collective::AllReduce(Reduce::Sum);
const MEAN: Collective = Collective::AllReduce(Reduce::Mean);

/// Each rank's call, and its number of elements.
#[rstest]
#[case(&[(SUM, 3), (SUM, 3), (SUM, 4)], "rank 2, in all_reduce: calls AllReduce(Sum) of 4 f32, while rank 0 calls \
    AllReduce(Sum) of 3 f32")]
#[case(&[(SUM, 3), (MEAN, 3), (SUM, 3)], "rank 1, in all_reduce: calls AllReduce(Mean)")]
#[case(&[0, 0, 1].map(|root| (Collective::Broadcast { root }, 3)), "rank 2, in broadcast: calls Broadcast { root: 1 }")]
fn ranks_that_disagree_are_named_on_all(
    #[case] calls: &[(Collective, usize)],
    #[case] words: &str,
) {
    let buffers = calls.iter().map(|(_, elements)| vec![0f32; *elements]);
    let results = together(buffers.collect(), |rank| calls[rank].0);
    assert_all_say(results, words);
}

#[test]
fn dtypes_of_one_size_are_told_apart() {
    let mut ranks = group(2);
    let mut other = ranks.pop().unwrap();
    thread::scope(|scope| {
        let other = scope.spawn(move || run(&mut other, SUM, &mut [bf16::ONE]));
        let first = run(&mut ranks[0], SUM, &mut [f16::ONE]);
        let results = vec![first, other.join().unwrap()];
        assert_all_say(results, "rank 1, in all_reduce: calls ");
    });
}

#[test]
fn whoever_waits_for_a_dropped_rank_is_told() {
    let mut ranks = group(3);
    let last = ranks.pop().unwrap();
    thread::scope(|scope| {
        let wait = |mut backend: ThreadBackend| {
            let result = run(&mut backend, SUM, &mut [0f32]);
            (backend, result)
        };
        let waiting = ranks
            .into_iter()
            .map(|rank| scope.spawn(move || wait(rank)));
        let waiting: Vec<_> = waiting.collect();
        thread::sleep(Duration::from_millis(20));
        drop(last);
        let ranks = waiting.into_iter().map(|rank| rank.join().unwrap());
        let (_ranks, results): (Vec<_>, Vec<_>) = ranks.unzip();
        assert_all_say(results, "rank 2, in all_reduce: has ended");
    });
}

#[test]
fn an_error_of_check_ends_a_wait() {
    let mut ranks = group(2);
    let mut x = [1f32];
    let sum = Collective::AllReduce(Reduce::Sum);
    let alone = ranks[0].run(sum, HostBuffer::of(&mut x), &patience(20));
    assert_all_say(vec![alone], "too late");
    // It left nothing behind.
    let mut late = ranks.pop().unwrap();
    let alone = late.run(sum, HostBuffer::of(&mut x), &patience(20));
    assert_all_say(vec![alone], "too late");
    assert_eq!(x, [1.0]);
}
