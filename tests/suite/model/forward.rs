//! Guarantees of a forward pass: shapes, causality, independent sequences, kernel against reference, no graph under
//! `no_grad`, and the same bits with any number of threads.

use super::*;
use rstest::rstest;
use tallow::ops::{KernelPolicy, with_kernel_policy};
use tallow::{is_grad_enabled, no_grad};

/// Returns the bits of the logits (T, V) of each sequence, row by row.
fn rows(logits: &Tensor) -> Vec<Vec<u64>> {
    let vocab_size = logits.dim(2).unwrap();
    let bits = bits(logits);
    bits.chunks_exact(vocab_size).map(<[u64]>::to_vec).collect()
}

/// Returns `tokens` with another id at the flat index `position`.
fn changed(tokens: &Tensor, position: usize) -> Tensor {
    let mut ids: Vec<u32> = tokens.flatten_all().unwrap().to_vec1().unwrap();
    ids[position] = (ids[position] + 11) % 29;
    Tensor::from_vec(ids, tokens.shape(), &CPU).unwrap()
}

#[rstest]
fn the_future_is_not_seen(
    #[values(DType::F32, DType::F64)] dtype: DType,
    #[values(KernelPolicy::Strict, KernelPolicy::Reference)] policy: KernelPolicy,
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
) {
    let model = attending(attention, &mini(), 1, dtype);
    let tokens = ids(29, 1, 13);
    let run =
        |tokens: &Tensor| with_kernel_policy(policy, || rows(&model.forward(tokens).unwrap()));
    let before = run(&tokens);
    for t in 0..13 {
        let after = run(&changed(&tokens, t));
        for i in 0..13 {
            // Equal bits before t, other logits from t on: only the past is visible.
            assert_eq!(before[i] == after[i], i < t, "token {t}, logits {i}");
        }
    }
}

#[rstest]
fn sequences_of_a_batch_are_independent(
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
) {
    let model = attending(attention, &mini(), 1, DType::F32);
    let tokens = ids(29, 3, 7);
    let before = rows(&model.forward(&tokens).unwrap());
    let after = rows(&model.forward(&changed(&tokens, 7)).unwrap()); // the first token of the second sequence
    assert_eq!(before[..7], after[..7]);
    assert_ne!(before[7], after[7]);
    assert_eq!(before[14..], after[14..]);

    let together = model.forward(&tokens).unwrap();
    for i in 0..3 {
        let alone = model.forward(&tokens.narrow(0, i, 1).unwrap()).unwrap();
        close("alone", &alone, &together.narrow(0, i, 1).unwrap(), 1e-6);
    }
}

#[rstest]
fn a_prefix_has_the_logits_it_has_in_a_longer_sequence(
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
) {
    let model = attending(attention, &mini(), 1, DType::F64);
    let tokens = ids(29, 2, 16);
    let whole = model.forward(&tokens).unwrap();
    for length in [1, 2, 5, 15] {
        let prefix = model
            .forward(&tokens.narrow(1, 0, length).unwrap())
            .unwrap();
        assert_eq!(prefix.dims(), [2, length, 29]);
        close(
            "prefix",
            &prefix,
            &whole.narrow(1, 0, length).unwrap(),
            1e-13,
        );
    }
}

/// Positions matter: permuting earlier tokens changes the logits of a later one.
#[test]
fn positions_are_seen() {
    let model = mini_model(1);
    let logits = |ids: [u32; 3]| rows(&model.forward(&Tensor::new(&[ids], &CPU).unwrap()).unwrap());
    assert_ne!(logits([4, 9, 2])[2], logits([9, 4, 2])[2]);
}

#[test]
fn tokens_as_a_view() {
    let model = mini_model(1);
    let tokens = ids(29, 5, 4);
    let view = tokens.t().unwrap(); // (4, 5), not contiguous
    let copy = view.contiguous().unwrap();
    let logits = model.forward(&view).unwrap();
    assert_eq!(bits(&logits), bits(&model.forward(&copy).unwrap()));
    assert_ne!(bits(&logits), bits(&model.forward(&tokens).unwrap()));
}

#[rstest]
fn half_precision_follows_f32(#[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm) {
    let tokens = ids(29, 2, 7);
    let wanted = mini_model(1).forward(&tokens).unwrap();
    for (dtype, bound) in [(DType::BF16, 3e-2), (DType::F16, 4e-3)] {
        let model = attending(attention, &mini(), 1, dtype);
        let logits = model.forward(&tokens).unwrap();
        assert_eq!(logits.dtype(), dtype);
        close("logits", &logits, &wanted, bound);
        assert_ne!(bits(&logits), bits(&wanted));
    }
}

/// Nothing is recorded by any kernel or reference, and the numbers are the same.
#[rstest]
fn no_graph_under_no_grad(
    #[values(DType::F32, DType::F64, DType::BF16)] dtype: DType,
    #[values(KernelPolicy::Prefer, KernelPolicy::Reference)] policy: KernelPolicy,
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
) {
    let model = attending(attention, &mini(), 1, dtype);
    let (tokens, targets) = (ids(29, 2, 7), ids(29, 2, 7));
    let run = || {
        with_kernel_policy(policy, || {
            let logits = model.forward(&tokens).unwrap();
            let loss = ops::cross_entropy(&logits, &targets).unwrap();
            (logits, loss)
        })
    };
    let (logits, loss) = run();
    assert!(logits.track_op() && loss.track_op());
    let (free_logits, free_loss) = no_grad(run);
    assert!(!free_logits.track_op() && !free_loss.track_op());
    assert_eq!(bits(&free_logits), bits(&logits));
    assert_eq!(bits(&free_loss), bits(&loss));
    // Without a graph, backward finds no variables.
    let gradients = free_loss.backward().unwrap();
    for (name, var) in model.parameters() {
        assert!(gradients.get(&var).is_none(), "{name}");
    }
    assert!(is_grad_enabled());
    assert!(run().1.track_op());
}

#[test]
fn no_grad_nests_and_ends() {
    let model = mini_model(1);
    let tracked = || model.forward(&ids(29, 1, 3)).unwrap().track_op();
    no_grad(|| {
        assert!(!no_grad(tracked));
        assert!(!tracked());
        // The setting belongs to this thread alone.
        let other = std::thread::scope(|scope| scope.spawn(tracked).join().unwrap());
        assert!(other);
    });
    assert!(tracked());
    let panicked = std::panic::catch_unwind(|| no_grad(|| panic!("on purpose")));
    assert!(panicked.is_err());
    assert!(tracked());
}

/// Sizes at which every kernel has several tasks.
#[rstest]
fn threads_do_not_change_a_bit(#[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm) {
    let config = TransformerConfig {
        vocab_size: 1003,
        context_length: 128,
        d_model: 96,
        num_heads: 6,
        d_ff: 200,
        ..mini()
    };
    let model = attending(attention, &config, 1, DType::F32);
    let (tokens, targets) = (
        ids(1003, 3, 123),
        ids(1003, 3, 123).affine(0.5, 0.0).unwrap(),
    );
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        pool.unwrap().install(|| {
            let (loss, gradients) = loss_and_gradients(&model, &tokens, &targets);
            let gradients = gradients.iter().map(|(_, gradient)| bits(gradient));
            (bits(&loss), gradients.collect::<Vec<_>>())
        })
    };
    let one = run(1);
    for threads in [1, 2, 3] {
        let (loss, gradients) = run(threads);
        assert_eq!(loss, one.0, "{threads} threads");
        for ((name, _), (a, b)) in model.parameters().iter().zip(gradients.iter().zip(&one.1)) {
            assert!(a == b, "{name} with {threads} threads");
        }
    }
}
