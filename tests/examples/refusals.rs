//! Values that no run can use are refused; unusual but valid ones are accepted.

use super::process::{assert_refused, example, run};

#[test]
fn counts_have_a_limit() {
    let counts = [
        ("attention_benchmark", "--steps", 1),
        ("attention_benchmark", "--warmup-steps", 0),
        ("compiled_benchmark", "--steps", 1),
        ("compiled_benchmark", "--warmup-steps", 0),
        ("compiled_benchmark", "--rounds", 1),
        ("custom_model", "--steps", 1),
        ("e2e_benchmark", "--steps", 1),
        ("e2e_benchmark", "--warmup-steps", 0),
        ("memory_profile", "--warmup-steps", 0),
        ("mixed_precision_benchmark", "--rounds", 1),
        ("mixed_precision_benchmark", "--steps", 1),
        ("mixed_precision_benchmark", "--warmup-steps", 0),
        ("precision_curves", "--steps", 1),
        ("profile", "--steps", 1),
        ("profile", "--warmup-steps", 0),
        ("train", "--steps", 1),
        ("train", "--sample", 0),
    ];
    for (name, flag, least) in counts {
        for count in [
            "1000000000000",
            "18446744073709551615",
            "99999999999999999999",
            "-1",
        ] {
            let line = format!("{name} {flag}={count}");
            assert_refused(&line, &run(example(&line)), 2, flag);
        }
        if least == 1 {
            let line = format!("{name} {flag} 0");
            assert_refused(&line, &run(example(&line)), 2, flag);
        }
    }
}

#[test]
fn numbers_that_mean_nothing_are_refused_as_they_are_parsed() {
    let amounts: &[&str] = &[
        "nan", "inf", "-inf", "-1", "0", "1e-300", "1e300", "1GiB", "",
    ];
    let rates: &[&str] = &["nan", "inf", "-1", "1e999", "a"];
    let flags = [
        ("attention_benchmark", "--memory-limit-gib", amounts),
        ("attention_benchmark", "--time-budget-ms", amounts),
        ("compiled_benchmark", "--memory-limit-gib", amounts),
        ("e2e_benchmark", "--memory-limit-gib", amounts),
        ("e2e_benchmark", "--compile --memory-budget-gib", amounts),
        ("memory_estimate", "--memory-limit-gib", amounts),
        ("memory_estimate", "--compile --memory-budget-gib", amounts),
        ("memory_profile", "--memory-limit-gib", amounts),
        ("mixed_precision_benchmark", "--memory-limit-gib", amounts),
        ("precision_curves", "--lr", rates),
        ("profile", "--memory-limit-gib", amounts),
        ("train", "--lr", rates),
        ("train", "--min-lr", rates),
        ("train", "--weight-decay", rates),
        ("train", "--clip", rates),
        ("train", "--betas", &["nan,0.9", "0.9,1", "-0.1,0.9", "inf"]),
        ("train", "--validation-fraction", &["nan", "0", "1", "-1"]),
        ("train", "--temperature", rates),
        ("train", "--top-p", &["nan", "0", "1.5", "-1"]),
    ];
    for (name, flag, values) in flags {
        for value in values {
            let line = format!("{name} {flag}={value}");
            let flag = flag.split_whitespace().last().unwrap();
            assert_refused(&line, &run(example(&line)), 2, flag);
        }
    }
}

#[test]
fn what_a_hostile_user_types() {
    let refused = [
        ("e2e_benchmark --size", 2, "--size"),
        ("e2e_benchmark --size nope", 1, "preset"),
        ("e2e_benchmark --batch-size 1,,2", 2, "--batch-size"),
        ("e2e_benchmark --steps 2 --steps 3", 2, "multiple times"),
        (
            "e2e_benchmark --batch-size 0 --context-length 8",
            1,
            "batch_size",
        ),
        ("e2e_benchmark --d-model 18446744073709551615", 1, "d_model"),
        (
            "e2e_benchmark --device cuda:99999999999999999999",
            1,
            "device",
        ),
        ("e2e_benchmark --device ../../etc", 1, "device"),
        ("e2e_benchmark --checkpoint every-0", 2, "every-0"),
        ("compiled_benchmark --config 0-8-16-1-2", 2, "batch"),
        (
            "compiled_benchmark --config 18446744073709551615-8-16-1-2",
            2,
            "batch",
        ),
        (
            "compiled_benchmark --config 1-8-16-18446744073709551615-2",
            2,
            "num_layers",
        ),
        ("compiled_benchmark --config 1-8-16-1", 2, "--config"),
        ("distributed_benchmark --part paper", 1, "--product-tflops"),
        (
            "distributed_benchmark SMALL --part paper --product-tflops 1 --memory-gb-s 1 --gather-gb-s 1 \
             --reduce-gb-s 1 2",
            1,
            "--reduce-gb-s",
        ),
        (
            "distributed_benchmark SMALL --part paper --product-tflops 1 --memory-gb-s 1 --gather-gb-s 1 \
             --reduce-gb-s NaN",
            1,
            "reduce_bytes",
        ),
        (
            "distributed_benchmark SMALL --part paper --product-tflops 1 --memory-gb-s 1 --gather-gb-s 1 \
             --reduce-gb-s 1 --bucket-mib 1 --world-size 999999999",
            1,
            "world_size",
        ),
        (
            "distributed_benchmark --part paper --world-size 0",
            2,
            "--world-size",
        ),
        (
            "distributed_benchmark --part accounting --link-gb-s 0",
            2,
            "--link-gb-s",
        ),
        ("profile --phase sideways", 2, "--phase"),
        ("profile SMALL --by kernel", 1, "--by"),
        ("toy_model_dtypes --seed 18446744073709551616", 2, "--seed"),
        ("train SMALL --data DATA --top-k 0", 1, "top_k"),
        (
            "train SMALL --data DATA --steps 2 --betas 0.9",
            1,
            "--betas",
        ),
        (
            "train SMALL --data DATA --checkpoint c --checkpoint-every 0",
            2,
            "--checkpoint-every",
        ),
    ];
    for (line, status, words) in refused {
        assert_refused(line, &run(example(line)), status, words);
    }
    let line = "attention_benchmark --sequence-length 8 --head-dim 8 --iterations 1000000000 --time-budget-ms 1";
    let ended = run(example(line));
    assert_eq!((ended.status, ended.err.as_str()), (Some(0), ""), "{line}");
    let out_of_memory = [
        "attention_benchmark --sequence-length 4294967296 --head-dim 64 --compare planned planned-flash --iterations 2",
        "attention_benchmark --compare naive planned --batch-size 18446744073709551615 --head-dim 8 --steps 2",
        "e2e_benchmark --batch-size 18446744073709551615 --context-length 8 --steps 2",
    ];
    for line in out_of_memory {
        let ended = run(example(line));
        assert_eq!(ended.status, Some(0), "{line}: {ended:?}");
        assert!(ended.out.contains("OOM"), "{line}: {}", ended.out);
    }
}

/// Tens of thousands of threads would spend hours searching each other's queues for work.
#[test]
fn more_threads_than_can_work_are_refused() {
    let lines = [
        "train SMALL --data DATA --steps 1 --sample 0",
        "e2e_benchmark SMALL --steps 1",
        "memory_estimate SMALL",
        "mixed_precision_accumulation",
        "toy_model_dtypes",
    ];
    for line in lines {
        for variable in ["RAYON_NUM_THREADS", "CANDLE_NUM_THREADS"] {
            let mut command = example(line);
            command.env(variable, "70000");
            let words = format!("environment: {variable} must be at most 4096, got 70000");
            assert_refused(line, &run(command), 1, &words);
        }
    }
}

/// Messages begin with the operation, neither with a type's name nor with "flags".
#[test]
fn errors_begin_with_the_operation() {
    let line = "profile SMALL --by kernel";
    let ended = run(example(line));
    assert_eq!(ended.status, Some(1), "{line}: {ended:?}");
    let start = "error: profile: --by must be";
    assert!(ended.err.starts_with(start), "{line}: {ended:?}");
}
