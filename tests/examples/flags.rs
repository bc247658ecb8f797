//! No flag is silently ignored: every flag of every example has an effect, or is refused where it has none.

use super::process::{assert_refused, example, run};
use std::collections::BTreeSet;

/// Flags that always have an effect.
const OUTPUT: &[&str] = &["format", "output"];
const COMMON: &[&str] = &["device", "tf32", "seed", "nvtx", "strict"];
const MODELS: &[&str] = &[
    "handout",
    "size",
    "family",
    "d-model",
    "d-ff",
    "num-layers",
    "num-heads",
    "vocab-size",
];

/// Flags of the end-to-end benchmarks that always have an effect.
const END_TO_END: &[&str] = &[
    "precision",
    "attention",
    "config",
    "mode",
    "rounds",
    "isolate",
    "warmup-steps",
    "steps",
    "memory-limit-gib",
];

/// An example, its flags that always have an effect, and for each other flag the command lines that refuse it.
struct Case {
    name: &'static str,
    always: &'static [&'static [&'static str]],
    refused: &'static [(&'static str, &'static [&'static str])],
}

/// Flags of the end-to-end benchmarks that are refused, unless steps are planned by default.
const END_TO_END_REFUSED: &[(&str, &[&str])] = &[
    ("batch-size", &["--config 1-8-16-1-2 --batch-size 2"]),
    (
        "context-length",
        &["--config 1-8-16-1-2 --context-length 8"],
    ),
    ("optimizer", &["--mode forward --optimizer adamw-bf16"]),
    (
        "view",
        &[
            "--compile --view phases",
            "--precision f32 bf16 --view phases",
        ],
    ),
    ("checkpoint", &["--mode forward --checkpoint block"]),
    ("compile", &["--precision bf16-full --compile"]),
    (
        "memory-budget-gib",
        &[
            "--memory-budget-gib 1",
            "--compile --mode forward --memory-budget-gib 1",
        ],
    ),
    ("optimizer-in-backward", &["--optimizer-in-backward"]),
    (
        "accumulation",
        &[
            "--accumulation 2",
            "--compile --mode train-step --accumulation 2",
            "--compile=only --mode all --accumulation 2",
        ],
    ),
];

const CASES: &[Case] = &[
    Case {
        name: "attention_benchmark",
        always: &[
            OUTPUT,
            COMMON,
            &[
                "batch-size",
                "num-heads",
                "context-length",
                "compare",
                "steps",
                "warmup-steps",
                "time-budget-ms",
                "precision",
                "module",
                "plot",
                "memory-limit-gib",
            ],
        ],
        refused: &[
            ("d-model", &["--d-model 64"]),
            ("causal", &["--module --causal", "--window 4 --causal"]),
            ("window", &["--module --window 4"]),
            ("head-dim", &["--module --head-dim 8"]),
            ("documents", &["--module --documents 2"]),
            (
                "full",
                &[
                    "--context-length 8 --head-dim 8 --time-budget-ms 10 --full",
                    "--module --context-length 8 --d-model 8 --time-budget-ms 10 --full",
                ],
            ),
        ],
    },
    Case {
        name: "compiled_benchmark",
        always: &[OUTPUT, COMMON, MODELS, END_TO_END],
        refused: &[
            ("batch-size", &["--config 1-8-16-1-2 --batch-size 2"]),
            (
                "context-length",
                &["--config 1-8-16-1-2 --context-length 8"],
            ),
            ("optimizer", &["--mode forward --optimizer adamw-bf16"]),
            ("view", &["--view phases"]),
            ("checkpoint", &["--mode forward --checkpoint block"]),
            ("compile", &["--precision bf16-full --compile"]),
            (
                "memory-budget-gib",
                &["--mode forward --memory-budget-gib 1"],
            ),
            (
                "optimizer-in-backward",
                &["--mode forward --optimizer-in-backward"],
            ),
            ("accumulation", &["--compile --accumulation 2"]),
        ],
    },
    Case {
        name: "custom_model",
        always: &[OUTPUT, COMMON, &["planned", "steps"]],
        refused: &[],
    },
    Case {
        name: "distributed_benchmark",
        always: &[OUTPUT, &["part", "gpus", "tf32", "nvtx", "strict"]],
        refused: &[
            (
                "device",
                &["--gpus 2 --device cpu", "--gpus 2 --device cuda:0"],
            ),
            ("timeout", &["--timeout 5", "--gpus 1 --timeout 5"]),
            ("nccl-max-ctas", &["--nccl-max-ctas 5"]),
            ("mib", &["--part steps --mib 1"]),
            ("handout", &["--part collectives --handout 2026"]),
            ("size", &["--part collectives --size tiny"]),
            ("family", &["--part collectives --family x"]),
            ("d-model", &["--part collectives --d-model 8"]),
            ("d-ff", &["--part collectives --d-ff 8"]),
            ("num-layers", &["--part collectives --num-layers 8"]),
            ("num-heads", &["--part collectives --num-heads 8"]),
            ("vocab-size", &["--part collectives --vocab-size 8"]),
            ("batch-size", &["--part collectives --batch-size 8"]),
            ("context-length", &["--part collectives --context-length 8"]),
            ("precision", &["--part accounting --precision bf16"]),
            ("attention", &["--part accounting --attention flash"]),
            ("bucket-mib", &["--part accounting --bucket-mib 1"]),
            ("exchange-bf16", &["--part collectives --exchange-bf16"]),
            ("strategy", &["--part collectives --strategy replicated"]),
            ("without-alone", &["--part paper --without-alone"]),
            ("seed", &["--part paper --seed 1"]),
            (
                "memory-budget-gib",
                &["--part accounting --memory-budget-gib 1"],
            ),
            ("warmup-steps", &["--part memory --warmup-steps 1"]),
            ("steps", &["--part memory --steps 1"]),
            ("trace", &["--part memory --trace t.json"]),
            ("world-size", &["--part steps --world-size 8"]),
            ("product-tflops", &["--part steps --product-tflops 8"]),
            ("memory-gb-s", &["--part steps --memory-gb-s 8"]),
            ("alone-ms", &["--part steps --alone-ms 8"]),
            ("reduce-gb-s", &["--part steps --reduce-gb-s 8"]),
            ("gather-gb-s", &["--part steps --gather-gb-s 8"]),
            ("exchange-us", &["--part steps --exchange-us 8"]),
            ("contention", &["--part steps --contention 0.5"]),
            ("fsdp", &["--part steps --fsdp 8"]),
            ("tensor-parallel", &["--part steps --tensor-parallel 8"]),
            ("device-tflops", &["--part steps --device-tflops 8"]),
            ("link-gb-s", &["--part steps --link-gb-s 8"]),
            ("links", &["--part steps --links 8 1"]),
            (
                "ranks",
                &[
                    "--device cuda:0 --ranks 2",
                    "--gpus 2 --ranks 2",
                    "--part accounting --ranks 4",
                    "--part paper --ranks 4",
                ],
            ),
            ("device-gb", &["--part steps --device-gb 8"]),
        ],
    },
    Case {
        name: "e2e_benchmark",
        always: &[OUTPUT, COMMON, MODELS, END_TO_END],
        refused: END_TO_END_REFUSED,
    },
    Case {
        name: "memory_estimate",
        always: &[
            OUTPUT,
            MODELS,
            &["precision", "batch-size", "context-length", "attention"],
            &["mode", "device"],
        ],
        refused: &[
            (
                "memory-limit-gib",
                &["--compile --memory-budget-gib 9 --memory-limit-gib 1"],
            ),
            ("checkpoint", &["--mode forward --checkpoint block"]),
            ("optimizer", &["--mode forward --optimizer adamw-bf16"]),
            ("compile", &["--precision bf16-full --compile"]),
            ("accumulation", &["--accumulation 2"]),
            ("clip-norm", &["--clip-norm 1"]),
            ("clip-value", &["--clip-value 1"]),
            ("dropout", &["--dropout 0.1"]),
            ("memory-budget-gib", &["--memory-budget-gib 1"]),
            ("optimizer-in-backward", &["--optimizer-in-backward"]),
            ("world-size", &["--world-size 2"]),
            (
                "strategy",
                &["--strategy fully-shard", "--compile --strategy fully-shard"],
            ),
            ("exchange", &["--compile --exchange flat"]),
            ("bucket-mib", &["--compile --bucket-mib 1"]),
            ("exchange-bf16", &["--compile --exchange-bf16"]),
        ],
    },
    Case {
        name: "memory_profile",
        always: &[
            OUTPUT,
            COMMON,
            MODELS,
            &[
                "precision",
                "batch-size",
                "context-length",
                "attention",
                "mode",
                "warmup-steps",
                "timeline",
                "memory-limit-gib",
            ],
        ],
        refused: &[
            ("optimizer", &["--mode forward --optimizer adamw-bf16"]),
            ("compile", &["--precision bf16-full --compile"]),
            ("checkpoint", &["--mode forward --checkpoint block"]),
            ("snapshot", &["--compile=only --snapshot s.json"]),
        ],
    },
    Case {
        name: "mixed_precision_accumulation",
        always: &[OUTPUT],
        refused: &[],
    },
    Case {
        name: "mixed_precision_benchmark",
        always: &[OUTPUT, COMMON, MODELS, END_TO_END],
        refused: END_TO_END_REFUSED,
    },
    Case {
        name: "precision_curves",
        always: &[
            OUTPUT,
            COMMON,
            &["precision"],
            &["data", "plot", "size", "d-model", "d-ff", "num-layers"],
            &["num-heads", "attention", "context-length", "batch-size"],
            &["steps", "lr"],
        ],
        refused: &[],
    },
    Case {
        name: "profile",
        always: &[
            OUTPUT,
            COMMON,
            MODELS,
            &[
                "precision",
                "batch-size",
                "context-length",
                "attention",
                "mode",
                "warmup-steps",
                "steps",
                "by",
                "trace",
                "flame-graph",
                "memory-limit-gib",
            ],
        ],
        refused: &[
            ("optimizer", &["--mode forward --optimizer adamw-bf16"]),
            ("checkpoint", &["--mode forward --checkpoint block"]),
            (
                "phase",
                &[
                    "--mode forward --phase backward",
                    "--mode forward forward-backward --phase optimizer",
                ],
            ),
            ("floor", &["--by kernel --floor"]),
            ("no-kernels", &["--no-kernels", "--device cpu --no-kernels"]),
            (
                "compile",
                &[
                    "--reference-ops --compile",
                    "--precision bf16-full --compile",
                ],
            ),
            (
                "reference-ops",
                &["--compile --reference-ops", "--strict --reference-ops"],
            ),
        ],
    },
    Case {
        name: "toy_model_dtypes",
        always: &[OUTPUT, COMMON],
        refused: &[],
    },
    Case {
        name: "train",
        always: &[
            &["precision", "optimizer-in-backward"],
            &["tf32", "seed", "nvtx", "strict", "gpus"],
            &["validation-fraction", "attention", "dropout", "family"],
            &[
                "activation-checkpointing",
                "context-length",
                "separator",
                "batch-size",
            ],
            &[
                "accumulation",
                "steps",
                "schedule",
                "lr",
                "weight-decay",
                "optimizer",
            ],
            &["clip", "clip-value", "evaluate-every", "checkpoint", "out"],
        ],
        refused: &[
            ("device", &["--gpus 2 --device cpu"]),
            ("data", &["--tokens t.bin --vocab-size 9 --data DATA"]),
            (
                "tokens",
                &[
                    "--data DATA --tokens t.bin --vocab-size 9",
                    "--tokens t.bin",
                ],
            ),
            (
                "vocab-size",
                &["--vocab-size 9", "--data DATA --vocab-size 9"],
            ),
            (
                "schedule-steps",
                &["--schedule constant --schedule-steps 9"],
            ),
            ("min-lr", &["--schedule constant --min-lr 0.1"]),
            (
                "warmup",
                &[
                    "--schedule constant --warmup 9",
                    "--schedule restarts --warmup 9",
                ],
            ),
            (
                "decay-steps",
                &["--decay-steps 9", "--schedule linear --decay-steps 9"],
            ),
            ("betas", &["--optimizer muon --betas 0.9,0.95"]),
            (
                "momentum",
                &["--momentum 0.9", "--optimizer lion --momentum 0.9"],
            ),
            ("size", &["--family x --size tiny"]),
            ("d-model", &["--family x --d-model 8"]),
            ("d-ff", &["--family x --d-ff 8"]),
            ("num-layers", &["--family x --num-layers 8"]),
            ("num-heads", &["--family x --num-heads 8"]),
            (
                "random-weights",
                &["--random-weights", "--size tiny --random-weights"],
            ),
            (
                "save-family",
                &["--save-family f", "--size tiny --save-family f"],
            ),
            ("ignore-config-key", &["--ignore-config-key k"]),
            ("overwrite", &["--family x --overwrite"]),
            ("save-dtype", &["--family x --save-dtype bf16"]),
            ("timeout", &["--timeout 5"]),
            ("nccl-max-ctas", &["--nccl-max-ctas 5"]),
            (
                "strategy",
                &["--strategy fully-shard", "--gpus 1 --strategy fully-shard"],
            ),
            (
                "exchange",
                &[
                    "--exchange flat",
                    "--gpus 2 --strategy fully-shard --exchange flat",
                ],
            ),
            (
                "bucket-mib",
                &["--bucket-mib 1", "--gpus 2 --exchange flat --bucket-mib 1"],
            ),
            ("exchange-bf16", &["--exchange-bf16"]),
            ("checkpoint-every", &["--checkpoint-every 5"]),
            ("keep", &["--keep 5"]),
            ("resume", &["--resume"]),
            ("sample", &["--tokens t.bin --vocab-size 9 --sample 5"]),
            ("temperature", &["--sample 0 --temperature 1"]),
            (
                "top-k",
                &["--sample 0 --top-k 1", "--temperature 0 --top-k 1"],
            ),
            (
                "top-p",
                &["--sample 0 --top-p 0.5", "--temperature 0 --top-p 0.5"],
            ),
            (
                "prompt",
                &[
                    "--sample 0 --prompt a",
                    "--tokens t.bin --vocab-size 9 --prompt a",
                ],
            ),
        ],
    },
];

/// Returns the long flags that a program's help lists.
fn flags_of(name: &str) -> BTreeSet<String> {
    let help = run(example(&format!("{name} --help-all"))).out;
    let flags = help.lines().filter_map(|line| {
        let line = line.trim_start();
        let line = line
            .strip_prefix("-h, ")
            .or_else(|| line.strip_prefix("-V, "))
            .unwrap_or(line);
        let flag = line.strip_prefix("--")?;
        let end = flag.find(|c: char| !(c.is_ascii_alphanumeric() || c == '-'));
        Some(flag[..end.unwrap_or(flag.len())].to_string())
    });
    let mut flags: BTreeSet<String> = flags.collect();
    for of_clap in ["help", "help-all", "version"] {
        assert!(flags.remove(of_clap), "{name}: {flags:?}");
    }
    flags
}

/// `--help` fits a page: one line for each common flag, and commands.
#[test]
fn help_fits_a_page() {
    for Case { name, .. } in CASES {
        let help = run(example(&format!("{name} --help"))).out;
        let widest = help.lines().map(|line| line.chars().count()).max();
        assert!(widest <= Some(100), "{name}: {help}");
        assert!(
            help.lines().count() < 60,
            "{name} has {} lines: {help}",
            help.lines().count()
        );
    }
}

#[test]
fn every_flag_has_its_case() {
    for Case {
        name,
        always,
        refused,
    } in CASES
    {
        let mut cases = BTreeSet::new();
        let conditional = refused.iter().map(|(flag, _)| *flag);
        for flag in always.concat().into_iter().chain(conditional) {
            assert!(cases.insert(flag.to_string()), "{name}: --{flag} twice");
        }
        assert_eq!(cases, flags_of(name), "{name}");
    }
    let examples = concat!(env!("CARGO_MANIFEST_DIR"), "/examples");
    let files = std::fs::read_dir(examples)
        .unwrap()
        .map(|file| file.unwrap().path());
    let programs = files.filter(|path| path.extension().is_some_and(|end| end == "rs"));
    assert_eq!(programs.count(), CASES.len());
}

#[test]
fn a_flag_without_effect_is_an_error() {
    for Case { name, refused, .. } in CASES {
        for (flag, lines) in *refused {
            for line in *lines {
                let line = format!("{name} {line}");
                let ended = run(example(&line));
                assert_refused(&line, &ended, 2, &format!("--{flag}"));
                assert!(!ended.err.contains("Usage: tallow"), "{}", ended.err);
            }
        }
    }
}

/// Flags that have an effect are accepted: each program starts, and then fails for another reason.
#[test]
fn a_flag_with_effect_is_taken() {
    for (line, words) in [
        (
            "attention_benchmark --module --d-model 8 --precision bf16-dropping-casts --output no/such",
            "no/such",
        ),
        (
            "compiled_benchmark --size tiny --batch-size 2 --vocab-size 100 --output no/such",
            "no/such",
        ),
        (
            "custom_model --steps 2 --seed 3 --planned --output no/such",
            "no/such",
        ),
        (
            "distributed_benchmark --part paper --memory-budget-gib 1 --strategy fully-shard",
            "--product-tflops",
        ),
        (
            "e2e_benchmark --compile --precision f32 bf16-full --optimizer adamw-bf16 --output no/such",
            "no/such",
        ),
        ("memory_estimate --batch-size 4 --output no/such", "no/such"),
        (
            "memory_profile --compile --snapshot s.json --output no/such",
            "no/such",
        ),
        ("toy_model_dtypes --seed 3 --output no/such", "no/such"),
        ("train --vocab-size 9 --tokens missing.bin", "missing.bin"),
        ("train --family missing --random-weights", "missing"),
    ] {
        assert_refused(line, &run(example(line)), 1, words);
    }
}
