//! The answers of `examples/profile`, to the handout's (a) to (e), from made up recordings.

use super::analysis::Profiled;
use super::span;
use tallow::probe::Kind;
use tallow::profile::{Cost, Parts, Recording};
use tallow::report::Fields;

fn stopwatch(phases: &[(&str, f64)]) -> Vec<Fields> {
    let row = |(phase, ms): &(&str, f64)| {
        let mut fields = Fields::new();
        fields.insert("phase", *phase).insert("mean_ms", *ms);
        fields
    };
    phases.iter().map(row).collect()
}

fn answers(recording: Recording, stopwatch: Vec<Fields>) -> (Vec<String>, Fields) {
    let profiled = Profiled {
        recording,
        stopwatch,
        apart: None,
    };
    profiled.analyse().unwrap()
}

fn number(numbers: &Fields, key: &str) -> f64 {
    numbers
        .get(key)
        .and_then(|value| value.as_f64())
        .unwrap_or_else(|| panic!("{key}"))
}

fn close(numbers: &Fields, expected: &[(&str, f64)]) {
    for (key, expected) in expected {
        let got = number(numbers, key);
        assert!(
            (got - expected).abs() < 1e-9,
            "{key}: {got}, not {expected}"
        );
    }
}

#[test]
fn answers_of_a_gpu_add_up() {
    let timed = stopwatch(&[
        ("forward", 3e-4),
        ("backward", 5e-4),
        ("train step", 9.9e-4),
    ]);
    let (notes, numbers) = answers(super::kernels::made_up(), timed);
    close(
        &numbers,
        &[
            ("profiled_ms_per_step", 1e-3),
            ("kernels_ms_per_step", 330e-6),
            ("ops_percent", 25.0),
            ("candle_percent", 8.0),
            ("gpu_idle_percent", 67.0),
            ("unexplained_percent", 0.0),
            ("products_percent_of_forward", 100.0 * 110.0 / 300.0),
            ("products_percent_of_whole", 21.0),
            ("softmax_percent_of_forward", 100.0 * 40.0 / 300.0),
            ("softmax_percent_of_whole", 4.0),
            ("attention_products_ms", 40e-6),
            ("attention_softmax_ms", 40e-6),
            ("attention_products_over_softmax_time", 1.0),
        ],
    );
    let all = notes.join("\n");
    for part in [
        "(b) Most of forward: nvjet_tst_96x128 (of linear), 23.3%, 1 times a step.",
        "(b) Most of forward and backward: nvjet_tst_96x128 (of linear), 21.2%, 2 times; forward's runs 2 times there.",
        "(c) Besides products, of forward: softmax_forward_f32 13.3%, badd_f32 6.7%.",
        "(d) Besides products, of the whole: badd_f32 7.0%, softmax_forward_f32 4.0%, set memory 1.0%.",
        "forward 0.00 and 0.00, backward 0.00 and 0.00",
    ] {
        assert!(all.contains(part), "{part} in {all}");
    }
}

/// A step of 1000 ns on the CPU, planned: an attention of 400 with 100 of products and 200 of softmax, a swiglu of 300
/// with 250 of products, a norm of 200, and 100 between the calls.
fn planned() -> Recording {
    let call = |path: &str, times, cost, [scores_ns, products_ns, softmax_ns]: [u64; 3]| {
        let mut call = span(Kind::Op, path, "forward", times, Some(2));
        call.cost = Some(cost);
        call.parts = Parts {
            products_ns,
            scores_ns,
            values_ns: if scores_ns > 0 {
                products_ns - scores_ns
            } else {
                0
            },
            softmax_ns,
            fused_ns: 0,
        };
        call
    };
    let cost = |product_flops, other_flops| Cost {
        product_flops,
        other_flops,
        ..Default::default()
    };
    Recording {
        spans: vec![
            span(Kind::Step, "", "", (0, 1000), None),
            span(Kind::Phase, "", "train step", (0, 1000), Some(0)),
            span(Kind::Phase, "", "forward", (0, 1000), Some(1)),
            call(
                "layers.0/attention",
                (0, 400),
                cost(600.0, 100.0),
                [40, 100, 200],
            ),
            call(
                "layers.0/swiglu",
                (400, 700),
                cost(900.0, 30.0),
                [0, 250, 0],
            ),
            call("layers.0/rms_norm", (700, 900), cost(0.0, 50.0), [0, 0, 0]),
        ],
        threads: vec!["main".into()],
        duration_ns: 1000,
        ..Default::default()
    }
}

#[test]
fn answers_of_a_cpu_add_up() {
    let (notes, numbers) = answers(planned(), stopwatch(&[("train step", 1e-3)]));
    close(
        &numbers,
        &[
            ("profiled_ms_per_step", 1e-3),
            ("ops_percent", 90.0),
            ("between_calls_percent", 10.0),
            ("candle_percent", 0.0),
            ("products_percent_of_forward", 35.0),
            ("products_percent_of_whole", 35.0),
            ("softmax_percent_of_forward", 20.0),
            ("attention_products_over_softmax_time", 0.5),
            ("attention_products_over_softmax_flops", 6.0),
        ],
    );
    let all = notes.join("\n");
    assert!(!all.contains("candle"), "{all}");
    let others =
        "attention's softmax 20.0%, rms_norm 20.0%, attention's rest 10.0%, swiglu's rest 5.0%";
    assert!(all.contains(others), "{all}");
    let one_by_one = "scores 0.000 ms a step, values 0.000, softmax 0.000";
    assert!(all.contains(one_by_one), "{all}");
    close(
        &numbers,
        &[
            ("attention_scores_ms", 40e-6),
            ("attention_values_ms", 60e-6),
        ],
    );
    // A step against a step: the phases are the profiler's alone.
    assert!(
        all.contains("by the stopwatch without it (+0.0%)."),
        "{all}"
    );
}

#[test]
fn parts_of_the_model_add_up() {
    let table = super::by_part::table("planned", &planned()).unwrap();
    let rows = table.rows.iter().map(|row| {
        let name = row.get("part").unwrap().as_str().unwrap();
        assert!(row.get("backward_ms_per_step").unwrap().is_null());
        let ns = (number(row, "forward_ms_per_step") * 1e6).round();
        assert_eq!(number(row, "percent"), 100.0 * ns / 1000.0);
        (name, ns)
    });
    let rows: Vec<(&str, f64)> = rows.collect();
    let expected = [
        ("layers.*", 250.0),
        ("layers.*/softmax", 200.0),
        ("layers.*/values", 60.0),
        ("layers.*/scores", 40.0),
    ];
    assert_eq!(rows, expected);
}
