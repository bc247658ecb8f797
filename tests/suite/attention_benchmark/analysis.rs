//! The answers and tables of the attention benchmark, from made-up figures.

#[path = "../../../examples/attention_benchmark/answers.rs"]
#[allow(dead_code)] // belongs to the example
mod answers;
#[path = "../../../examples/attention_benchmark/figure.rs"]
mod figure;
#[path = "../../../examples/attention_benchmark/measured.rs"]
#[allow(dead_code)]
mod measured;

use crate::words::{self, mean_speedup};
use answers::*;
use approx::assert_relative_eq;
use measured::Measured;
use rstest::rstest;
use tallow::bench::{AttentionMemory, AttentionResult, AttentionStatus, PhaseTime};
use tallow::memory::{AttentionWorkload, Target, attention_breakdown, planned_attention_breakdown};
use tallow::report::Statistics;
use tallow::report::plot;

const QUIET: f64 = 0.01;
const NOISY: f64 = 2.0;

/// Returns times of `ms` for forward and twice that for backward, with a standard deviation of `spread` times the mean.
fn times(ms: f64, spread: f64) -> Vec<PhaseTime> {
    let times = [1.0, 2.0, 3.0].map(|part| PhaseTime {
        statistics: statistics(part * ms, part * ms * spread),
        samples_ms: Vec::new(),
        warmup_ms: Vec::new(),
        tokens_per_s: None,
        flops: None,
        flops_per_s: None,
        mfu_percent: None,
    });
    times.into()
}

/// Returns the statistics of ten samples with this mean and standard deviation.
fn statistics(mean_ms: f64, std_ms: f64) -> Statistics {
    let distance = std_ms * 0.9f64.sqrt();
    let samples = [[mean_ms - distance; 5], [mean_ms + distance; 5]];
    Statistics::new(&samples.concat()).unwrap()
}

/// Returns a measurement with `bytes` before backward and four times that at the peak.
fn measured(
    implementation: &'static str,
    length: usize,
    width: usize,
    ms: f64,
    bytes: u64,
) -> Measured {
    let mut own = refused(implementation, length, width, AttentionStatus::Ok);
    own.result.times = times(ms, QUIET);
    own.result.memory = Some(AttentionMemory {
        before_backward_bytes: bytes,
        peak_bytes: [4 * bytes; 3],
        ..Default::default()
    });
    own
}

fn refused(
    implementation: &'static str,
    context_length: usize,
    width: usize,
    status: AttentionStatus,
) -> Measured {
    Measured {
        result: AttentionResult {
            implementation,
            precision: "f32",
            context_length,
            head_dim: Some(width),
            status,
            ..Default::default()
        },
        variant: String::new(),
    }
}

/// Returns figures of naive (time and memory T^2) and flash attention (half the time, memory T). Naive runs out of
/// memory at T 4096, width 64.
fn grid() -> Vec<Measured> {
    let mut all = Vec::new();
    for width in [16, 64] {
        for length in [256, 1024, 4096] {
            let ms = (length * length) as f64 / 1000.0;
            all.push(match (length, width) {
                (4096, 64) => refused("naive", 4096, 64, AttentionStatus::OutOfMemory),
                _ => measured("naive", length, width, ms, (length * length) as u64),
            });
            all.push(measured("flash", length, width, ms / 2.0, length as u64));
        }
    }
    all.push(refused("flash", 256, 512, AttentionStatus::Unsupported));
    all
}

/// Returns the limit at T 16,384, where 4 GiB are available.
fn limit() -> Measured {
    let workload = workload();
    let mut limit = refused("naive", 16_384, 64, AttentionStatus::OutOfMemory);
    limit.result.breakdown = Some(attention_breakdown(&workload, Target::Cuda).unwrap());
    limit.result.composed_bytes = Some(workload.composed_bytes());
    limit.result.available_bytes = Some(4 << 30);
    limit
}

fn workload() -> AttentionWorkload {
    AttentionWorkload {
        sequence_length: 16_384,
        ..Default::default()
    }
}

#[track_caller]
fn assert_says(text: &str, sentences: &[&str]) {
    for sentence in sentences {
        assert!(text.contains(sentence), "{sentence} in {text}");
    }
}

#[test]
fn runs_out_of_memory_are_counted_and_the_first_size_is_accounted_for() {
    let (all, limits) = (grid(), [limit()]);
    assert_says(
        &out_of_memory(&all, &limits),
        &[
            "Out of memory: naive at 1 of 6 sizes, the smallest T 4096, d 64.",
            "If T is doubled until the predicted peak exceeds the 4,096.0 MiB that may be used",
            "naive at T 16384, d 64 (",
        ],
    );
    assert_eq!(out_of_memory(&all[..2], &[]), "No run did, of 2.");
    // 8 x 16,384^2 x 4 bytes: scores and probabilities, and an output of 32 MiB.
    let [limit] = &limits;
    assert_says(
        &accounting(limit).unwrap(),
        &[
            "naive attention with B 8, H 1, T 16384, Dh 64, 4 bytes an element: q, k, v 3BHTDh 96.0 MiB",
            "probabilities BHT^2 8,192.0 MiB",
            "The largest term is probabilities (",
            "2BHT^2 + BHTDh elements: 16,416.0 MiB.",
        ],
    );
    assert_says(
        &accounting(limit).unwrap(),
        &["+ output BHTDh 32.0 MiB", "+ gradient of q BHTDh 32.0 MiB"],
    );
    let on_cpu = attention_breakdown(&workload(), Target::Cpu).unwrap();
    assert_says(&on_cpu.to_string(), &["+ scratch of the kernel "]);
    let mut flash = limit.clone();
    flash.result.implementation = "flash";
    assert!(!accounting(&flash).unwrap().contains("PyTorch"));
    let account = to_account_for(&[flash, limit.clone()]).map(|limit| limit.implementation);
    assert_eq!(account, Some("naive"));
}

#[test]
fn growth_is_fitted_at_the_largest_width_with_three_lengths() {
    let all: Vec<Measured> = grid().into_iter().filter(|m| m.width() == 16).collect();
    assert_says(
        &saved_memory(&all, &[limit()]).unwrap(),
        &[
            "naive: memory T^2.00 (R^2 1.000), time T^2.00 (R^2 1.000), d 16, T 256 to 4096.",
            "flash: memory T^1.00 (R^2 1.000), time T^2.00 (R^2 1.000), d 16, T 256 to 4096.",
            "naive saves probabilities, BHT^2 elements",
        ],
    );
    assert_eq!(saved_memory(&all[..2], &[]), None);
}

#[test]
fn times_that_follow_no_power_of_t_have_no_exponent() {
    let ms = [1.0, 90.0, 1.0];
    let all = [256, 1024, 4096].into_iter().zip(ms);
    let all: Vec<Measured> = all
        .map(|(t, ms)| measured("naive", t, 16, ms, t as u64))
        .collect();
    assert_says(
        &saved_memory(&all, &[]).unwrap(),
        &["time unclear (R^2 0.00)", "longer sequences would decide"],
    );
}

#[test]
fn what_eliminates_the_memory_follows_from_flash() {
    let text = eliminated(&grid()).unwrap();
    assert_says(
        &text,
        &[
            "At T 4096, d 16 it holds 0.0 MiB before backward, naive 16.0 MiB: 100% less.",
            "It ran at T 4096, d 64 with a peak of 0.0 MiB, where naive runs out of memory.",
        ],
    );
    let larger = [
        measured("naive", 64, 16, 1.0, 100),
        measured("flash", 64, 16, 1.0, 120),
    ];
    assert_says(
        &eliminated(&larger).unwrap(),
        &["no less. Longer sequences would show"],
    );
    assert_eq!(eliminated(&larger[..1]), None);
}

/// An implementation slower and larger at short lengths, faster and smaller at long ones.
#[test]
fn implementations_are_compared_as_the_figures_are() {
    let mut all = Vec::new();
    for (length, ms, bytes) in [(64, 125.0, 110), (512, 80.0, 80), (4096, 50.0, 50)] {
        all.push(measured("naive", length, 64, 100.0, 100));
        all.push(measured("planned", length, 64, ms, bytes));
    }
    let own = compared_with_naive(&all);
    assert_eq!(own.len(), 1);
    assert_eq!(
        own[0].question,
        "How does planned compare with naive attention?"
    );
    assert_says(
        &own[0].answer,
        &[
            // The cube root of 0.8 x 1.25 x 2.
            "forward 1.26x, backward 1.26x, together 1.26x with 24% less peak memory",
            "at T 64 forward 0.80x, backward 0.80x, together 0.80x with 10% more peak memory",
            "at T 4096 forward 2.00x, backward 2.00x, together 2.00x with 50% less peak memory",
        ],
    );
    assert!(!own[0].answer.contains("unclear"), "{}", own[0].answer);
    for m in &mut all {
        m.result.times = times(1.0, NOISY);
    }
    assert_says(
        &compared_with_naive(&all)[0].answer,
        &[
            "forward unclear, backward unclear, together unclear with 24% less",
            "more steps on a quiet machine",
        ],
    );
    for m in &mut all {
        m.result.times.clear();
    }
    assert!(compared_with_naive(&all).is_empty());
}

#[test]
fn variants_are_compared_each_with_its_own_baseline() {
    let mut all = Vec::new();
    for (precision, naive, planned) in [("f32", 4.0, 2.0), ("bf16", 8.0, 1.0)] {
        for (name, ms) in [("naive", naive), ("planned", planned)] {
            let mut own = measured(name, 16, 256, ms, 100);
            own.result.precision = precision;
            own.variant = format!("{precision}, 1 head");
            all.push(own);
        }
    }
    assert_says(
        &compared_with_naive(&all)[0].answer,
        &[
            "planned (f32, 1 head) forward 2.00x, backward 2.00x, together 2.00x with the same peak memory",
            "planned (bf16, 1 head) forward 8.00x",
        ],
    );
    assert_says(
        &precisions(&all).unwrap(),
        &[
            "against f32, naive (bf16, 1 head) forward 0.50x, backward 0.50x, together 0.50x with the same",
            "planned (bf16, 1 head) forward 2.00x",
        ],
    );
    assert_eq!(precisions(&all[..2]), None);
}

#[rstest]
#[case(&[QUIET, QUIET], "2.00x")]
#[case(&[QUIET, NOISY], "2.00x (1 of 2 unclear)")]
#[case(&[QUIET, NOISY, NOISY], "unclear")]
#[case(&[], "unclear")]
fn a_mean_of_speedups_needs_half_of_them_clear(#[case] spreads: &[f64], #[case] expected: &str) {
    let speedups = spreads.iter().map(|spread| {
        let naive = measured("naive", 1, 1, 2.0, 1);
        let mut other = measured("flash", 1, 1, 1.0, 1);
        other.result.times = times(1.0, *spread);
        other.speedup_over(&naive, 0).unwrap()
    });
    assert_eq!(mean_speedup(&speedups.collect::<Vec<_>>()), expected);
}

#[test]
fn results_become_lines_with_speedups() {
    let all = grid();
    assert_eq!(all.len(), 13);
    let table = measured::table(&all).unwrap();
    let cell = |line: usize, key: &str| table.shown_rows[line].get(key).cloned().unwrap();
    assert_eq!(cell(0, "forward+backward speed-up"), 1.0);
    assert_eq!(cell(1, "forward speed-up"), 2.0);
    assert_relative_eq!(
        cell(1, "saved_percent").as_f64().unwrap(),
        100.0 - 100.0 / 256.0
    );
    assert_eq!(cell(10, "forward"), "OOM");
    assert!(cell(11, "forward+backward speed-up").is_null());
    assert_eq!(cell(12, "forward"), "unsupported");
    let has_model = |all: &[Measured]| {
        let columns = measured::table(all).unwrap().columns;
        columns.iter().any(|column| column.key == "model_bytes")
    };
    assert!(!has_model(&all));
    let mut layer = all[0].clone();
    (layer.result.head_dim, layer.result.d_model) = (None, Some(64));
    assert!(has_model(&[layer]));
}

#[test]
fn the_figure_has_a_colour_for_each_implementation_and_a_dash_for_each_width() {
    let caption = || vec!["B 8 on a machine".to_string()];
    let charts = figure::figure(&grid(), caption());
    assert_eq!(charts.len(), 2);
    for chart in &charts {
        assert!(chart.log_x && chart.log_y);
        let names: Vec<_> = chart.series.iter().map(|s| s.name.as_str()).collect();
        let expected = [
            "naive, d 16",
            "flash, d 16",
            "naive, d 64",
            "flash, d 64",
            "naive, d 512",
            "flash, d 512",
        ];
        assert_eq!(names, expected);
        assert_eq!(chart.colours, Some(2));
        assert_eq!(chart.series[2].points.len(), 2);
        assert_eq!(chart.series[2].crosses, [4096.0]); // out of memory
        assert!(chart.series[3].crosses.is_empty());
    }
    let svg = plot::to_svg(&charts).unwrap();
    assert!(svg.contains("B 8 on a machine") && svg.contains("A cross marks a size"));
    let memory = &charts[1].series[0].points;
    assert_relative_eq!(memory[2].1, 4.0 * 4096f64.powi(2) / 1048576.0);
    assert!(svg.contains("naive, d 512 (no data)"));
    let mut without_memory = grid();
    for m in &mut without_memory {
        m.result.memory = None;
    }
    assert_eq!(figure::figure(&without_memory, caption()).len(), 1);
}

/// On a GPU a plan's workspace for matmuls is counted, and cuBLAS's is not: small sizes would look as if planning cost it.
#[test]
fn a_note_names_the_workspace_of_planned_attention() {
    let note = |kernels| {
        let workload = AttentionWorkload::default();
        let mut planned = measured("planned", 512, 64, 1.0, 1 << 20);
        planned.result.breakdown = Some(planned_attention_breakdown(&workload, kernels).unwrap());
        let notes = measured::notes(&[measured("naive", 512, 64, 1.0, 1 << 20), planned]);
        let of_planned = notes.into_iter().filter(|note| note.starts_with("Planned"));
        of_planned.collect::<String>()
    };
    let (cpu, cuda) = (note(Target::Cpu), note(Target::Cuda));
    assert!(cpu.ends_with("includes the plan's buffer."), "{cpu}");
    assert!(
        cuda.contains("the plan's buffer and 32.0 MiB of workspace for matmuls"),
        "{cuda}"
    );
    assert!(
        measured::notes(&[measured("naive", 512, 64, 1.0, 1)])
            .iter()
            .all(|note| !note.starts_with("Planned"))
    );
}
