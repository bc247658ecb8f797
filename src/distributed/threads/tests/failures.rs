//! Ranks that disagree, are gone, or wait for too long.

use super::*;

fn assert_all_say<T: Debug>(results: Vec<Result<T>>, words: &str) {
    for result in results {
        let text = result.unwrap_err().to_string();
        assert!(text.contains(words), "{text}");
    }
}

#[test]
fn ranks_that_disagree_are_named_on_all() {
    let buffers = |sizes: &[usize]| sizes.iter().map(|n| vec![0f32; *n]).collect::<Vec<_>>();
    let sum = Collective::AllReduce(Reduce::Sum);
    assert_all_say(
        together(DType::F32, buffers(&[3, 3, 4]), |_| sum),
        "rank 2, in all_reduce: calls AllReduce(Sum) of 4 f32, while rank 0 calls AllReduce(Sum) of 3 f32",
    );
    let mean = |rank| match rank {
        1 => Collective::AllReduce(Reduce::Mean),
        _ => sum,
    };
    assert_all_say(
        together(DType::F32, buffers(&[3, 3, 3]), mean),
        "rank 1, in all_reduce: calls AllReduce(Mean)",
    );
    let roots = |rank| Collective::Broadcast { root: rank / 2 };
    assert_all_say(
        together(DType::F32, buffers(&[3, 3, 3]), roots),
        "rank 2, in broadcast: calls Broadcast { root: 1 }",
    );
    let sends = |rank| match rank {
        0 => Collective::Send { to: 1 },
        _ => sum,
    };
    assert_all_say(together(DType::F32, buffers(&[3, 3]), sends), "rank 1, in ");
    let sizes = |rank| match rank {
        0 => Collective::Send { to: 1 },
        _ => Collective::Receive { from: 0 },
    };
    assert_all_say(
        together(DType::F32, buffers(&[3, 2]), sizes),
        "Receive { from: 0 } of 2 f32",
    );
    let both_send = |rank| Collective::Send { to: 1 - rank };
    assert_all_say(
        together(DType::F32, buffers(&[3, 3]), both_send),
        "rank 1, in send",
    );
    // Dtypes of one size.
    let mut ranks = group(2);
    let mut other = ranks.pop().unwrap();
    thread::scope(|scope| {
        let other = scope.spawn(move || run(&mut other, sum, DType::BF16, &mut [bf16::ONE]));
        let first = run(&mut ranks[0], sum, DType::F16, &mut [f16::ONE]);
        assert_all_say(
            vec![first, other.join().unwrap()],
            "rank 1, in all_reduce: calls ",
        );
    });
}

#[test]
fn whoever_waits_for_a_dropped_rank_is_told() {
    let mut ranks = group(3);
    let last = ranks.pop().unwrap();
    thread::scope(|scope| {
        let wait = |mut backend: ThreadBackend| {
            let mut x = [0f32];
            let result = run(&mut backend, Collective::Barrier, DType::F32, &mut x);
            (backend, result)
        };
        let waiting = ranks
            .into_iter()
            .map(|rank| scope.spawn(move || wait(rank)));
        let waiting: Vec<_> = waiting.collect();
        thread::sleep(Duration::from_millis(20));
        drop(last);
        let ranks = waiting.into_iter().map(|rank| rank.join().unwrap());
        let (ranks, results): (Vec<_>, Vec<_>) = ranks.unzip();
        assert_all_say(results, "rank 2, in barrier: has ended");
        for mut backend in ranks {
            // They still have each other.
            scope.spawn(move || {
                let pair = match backend.rank {
                    0 => Collective::Send { to: 1 },
                    _ => Collective::Receive { from: 0 },
                };
                run(&mut backend, pair, DType::F32, &mut [0f32]).unwrap();
            });
        }
    });
}

#[test]
fn an_error_of_check_ends_a_wait() {
    let mut ranks = group(2);
    let mut x = [1f32];
    let sum = Collective::AllReduce(Reduce::Sum);
    let alone = ranks[0].run(sum, host(DType::F32, &mut x), &patience(20));
    assert_all_say(vec![alone], "too late");
    // It left nothing behind.
    let mut late = ranks.pop().unwrap();
    let alone = late.run(sum, host(DType::F32, &mut x), &patience(20));
    assert_all_say(vec![alone], "too late");
    assert_eq!(x, [1.0]);
}

#[test]
fn what_cannot_be_is_refused_before() {
    let mut ranks = group(2);
    let mut refused = |collective, dtype, elements| {
        let mut memory = vec![0u64; elements];
        let buffer = HostBuffer {
            start: memory.as_mut_ptr().cast(),
            elements,
            dtype,
        };
        let check = || Ok(());
        ranks[1]
            .run(collective, buffer, &check)
            .unwrap_err()
            .to_string()
    };
    for (text, words) in [
        (
            refused(Collective::AllGather, DType::F32, 3),
            "elements that 2 ranks divide, got 3",
        ),
        (
            refused(Collective::AllReduce(Reduce::Mean), DType::I64, 2),
            "to be reduced, got i64",
        ),
        (
            refused(Collective::Barrier, DType::I16, 2),
            "u32 or i64, got i16",
        ),
        (
            refused(Collective::Broadcast { root: 2 }, DType::F32, 2),
            "root must be under",
        ),
        (
            refused(Collective::Send { to: 1 }, DType::F32, 2),
            "to must be another of the 2 ranks than 1",
        ),
        (
            refused(Collective::Receive { from: 2 }, DType::F32, 2),
            "from must be another",
        ),
    ] {
        assert!(text.contains(words), "{text}");
    }
}
