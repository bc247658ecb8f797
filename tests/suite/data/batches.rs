//! Guarantees of random and sequential batches.

use super::*;
use proptest::prelude::*;
use rstest::rstest;
use tallow::data::{RandomBatches, SequentialBatches};

#[test]
fn targets_are_inputs_moved_by_one() {
    let tokens = counting(50);
    let batches = RandomBatches::new(&tokens, 3, 7, 5).unwrap();
    let starts: Vec<_> = batches.starts(2).collect();
    let batch = batches.batch(2, &CPU).unwrap();
    assert_eq!(batch.num_targets(), 21);
    let (inputs, targets) = both(&batch);
    for (row, start) in starts.into_iter().enumerate() {
        let start = start as u32;
        assert_eq!(inputs[row], (start..start + 7).collect::<Vec<_>>());
        assert_eq!(targets[row], (start + 1..start + 8).collect::<Vec<_>>());
    }
}

/// Values from an implementation of ChaCha8 in Python: they are documented, and resumed runs rely on them.
#[rstest]
#[case(1337, 0, [878, 298, 481, 584, 223, 74, 906, 678, 849, 698])]
#[case(1337, 1, [35, 310, 866, 538, 892, 123, 523, 243, 338, 703])]
#[case(u64::MAX, 1 << 40, [474, 936, 266, 582, 35, 336, 696, 684, 41, 978])]
fn random_starts_are_as_specified(
    #[case] seed: u64,
    #[case] step: u64,
    #[case] starts: [usize; 10],
) {
    let batches = RandomBatches::new(&counting(1008), 10, 8, seed).unwrap();
    assert_eq!(batches.num_starts(), 1000);
    assert_eq!(batches.starts(step).collect::<Vec<_>>(), starts);
}

#[test]
fn a_random_batch_depends_on_seed_and_step_alone() {
    let tokens = counting(10_000);
    let of = |batch_size, seed| RandomBatches::new(&tokens, batch_size, 16, seed).unwrap();
    let forwards: Vec<_> = (0..20)
        .map(|s| both(&of(4, 1).batch(s, &CPU).unwrap()))
        .collect();
    let one = of(4, 1);
    for step in (0..20).rev() {
        assert_eq!(
            both(&one.batch(step, &CPU).unwrap()),
            forwards[step as usize]
        );
    }
    for (a, b) in forwards.iter().zip(&forwards[1..]) {
        assert_ne!(a, b);
    }
    assert_ne!(both(&of(4, 2).batch(0, &CPU).unwrap()), forwards[0]);
    // A larger batch begins with the rows of the smaller one.
    assert_eq!(
        rows(&of(9, 1).batch(3, &CPU).unwrap().inputs)[..4],
        forwards[3].0
    );
}

/// Ten starts, 20,000 draws: the chi-squared statistic with 9 degrees of freedom exceeds 33.7 for one seed in 10,000.
#[test]
fn random_starts_are_uniform_up_to_the_last() {
    let batches = RandomBatches::new(&counting(14), 20, 4, 42).unwrap();
    let mut counts = [0u32; 10];
    for step in 0..1000 {
        for (row, start) in batches.starts(step).enumerate() {
            counts[start] += 1;
            assert!(row < 20);
        }
    }
    let statistic: f64 = counts
        .iter()
        .map(|&n| (f64::from(n) - 2000.0).powi(2) / 2000.0)
        .sum();
    assert!(statistic < 33.7, "{counts:?}: {statistic}");

    // The last start reaches the last token, as a target; with a single window it is always that one.
    let last = (0..)
        .find(|&step| batches.starts(step).any(|start| start == 9))
        .unwrap();
    let (_, targets) = both(&batches.batch(last, &CPU).unwrap());
    assert!(targets.iter().any(|row| row[3] == 13));
    let single = RandomBatches::new(&counting(5), 3, 4, 7).unwrap();
    assert_eq!(single.starts(0).collect::<Vec<_>>(), [0, 0, 0]);
}

proptest! {
    #[test]
    fn sequential_batches_predict_every_target_once_in_order(
        sequence_length in 1usize..40,
        batch_size in 1usize..9,
        more in 1usize..400,
    ) {
        let len = sequence_length + more;
        let tokens = counting(len + 3).slice(3..len + 3).unwrap();
        let batches = SequentialBatches::new(&tokens, batch_size, sequence_length).unwrap();
        let iter = batches.iter(&CPU);
        prop_assert_eq!(iter.len(), batches.len());
        let all: Vec<Batch> = iter.map(Result::unwrap).collect();
        prop_assert_eq!(all.len(), batches.len());

        let (mut inputs, mut targets) = (Vec::new(), Vec::new());
        for batch in &all {
            inputs.extend(rows(&batch.inputs).concat());
            targets.extend(rows(&batch.targets).concat());
        }
        let first = 3;
        let last = first + len as u32 - 1;
        prop_assert_eq!(inputs, (first..last).collect::<Vec<_>>());
        prop_assert_eq!(targets, (first + 1..=last).collect::<Vec<_>>());
        prop_assert_eq!(all.iter().map(Batch::num_targets).sum::<usize>(), batches.num_targets());

        // Full batches, then at most one of full windows, then the remainder in one row.
        let windows = (len - 1) / sequence_length;
        let mut shapes = vec![vec![batch_size, sequence_length]; windows / batch_size];
        if windows % batch_size > 0 {
            shapes.push(vec![windows % batch_size, sequence_length]);
        }
        if (len - 1) % sequence_length > 0 {
            shapes.push(vec![1, (len - 1) % sequence_length]);
        }
        for tensor in [|batch: &Batch| batch.inputs.clone(), |batch: &Batch| batch.targets.clone()] {
            let found: Vec<Vec<usize>> = all.iter().map(|batch| tensor(batch).dims().to_vec()).collect();
            prop_assert_eq!(&found, &shapes);
        }
    }
}

#[test]
fn sizes_that_cannot_work() {
    let tokens = counting(10);
    for (batch_size, sequence_length, field) in [(0, 4, "batch_size"), (4, 0, "sequence_length")] {
        let parts = [field, "at least 1", "got 0"];
        let error = refusal(
            RandomBatches::new(&tokens, batch_size, sequence_length, 0),
            &parts,
        );
        assert!(matches!(error, Error::Config { .. }));
        refusal(
            SequentialBatches::new(&tokens, batch_size, sequence_length),
            &parts,
        );
    }
    assert!(RandomBatches::new(&tokens, 1, 9, 0).is_ok());
    assert!(SequentialBatches::new(&tokens, 1, 9).is_ok());
    for sequence_length in [10, usize::MAX] {
        let wanted = format!("more than {sequence_length} tokens");
        let parts = ["ids in memory", &wanted, "got 10 tokens"];
        let error = refusal(RandomBatches::new(&tokens, 1, sequence_length, 0), &parts);
        assert!(matches!(error, Error::Data { .. }));
        refusal(SequentialBatches::new(&tokens, 1, sequence_length), &parts);
    }
    for batch_size in [usize::MAX, usize::MAX / 2, isize::MAX as usize / 16 + 1] {
        refusal(
            RandomBatches::new(&tokens, batch_size, 4, 0),
            &["batch_size", "addressed"],
        );
    }
    // Evaluation creates no more rows than there are windows, so any batch size works.
    let all = SequentialBatches::new(&tokens, usize::MAX, 4).unwrap();
    assert_eq!(all.len(), 2);
    assert_eq!(all.batch(0, &CPU).unwrap().inputs.dims(), [2, 4]);
    refusal(all.batch(2, &CPU), &["ids in memory", "under 2", "got 2"]);
}
