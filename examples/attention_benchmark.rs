//! Times attention forward and backward, naive and flash side by side, with its memory, over a grid of sequence lengths
//! and head dimensions; or the layer around it, with `--module`.
//!
//! ```text
//! cargo run --example attention_benchmark
//! cargo run --example attention_benchmark -- --full --plot attention.svg
//! cargo run --example attention_benchmark -- --sequence-length 512,2048 --head-dim 64 --heads 12 --batch-size 1 --causal
//! cargo run --example attention_benchmark -- --module --format markdown
//! ```

#[path = "attention_benchmark/columns.rs"]
mod columns;
mod common;
#[path = "attention_benchmark/grid.rs"]
mod grid;

use candle_core::{DType, Device};
use clap::{Parser, ValueEnum};
use common::{Common, Output};
use std::path::PathBuf;
use std::process::ExitCode;
use tallow::Result;
use tallow::attention::Algorithm;
use tallow::bench::{Analysis, Limit, Sampling, figure};
use tallow::report::{Fields, Report, format_mib};

/// Times attention forward and backward, naive and flash side by side, with its memory.
///
/// Without --full the grid is one that takes under two minutes.
#[derive(Parser)]
#[command(version)]
struct Flags {
    /// Sequences in a batch
    #[arg(long, default_value_t = 8)]
    batch_size: usize,

    /// Attention heads
    #[arg(long, default_value_t = 1)]
    heads: usize,

    /// The dimension of a head; several allowed [default: 16 64; with --full 16 32 64 128]
    #[arg(long, num_args = 1.., value_delimiter = ',', conflicts_with = "module")]
    head_dim: Vec<usize>,

    /// Tokens in a sequence; several allowed [default: 256 1024 4096; with --full 8192 and 16384 too; with --module 16 32
    /// 64 128]
    #[arg(long, num_args = 1.., value_delimiter = ',')]
    sequence_length: Vec<usize>,

    /// naive, flash; several allowed
    #[arg(long, num_args = 1.., value_delimiter = ',', default_value = "naive,flash")]
    implementation: Vec<Algorithm>,

    /// Passes that are measured; fewer, at least 2, where the time budget ends first
    #[arg(long, default_value_t = 100)]
    iterations: usize,

    /// Passes that are run and not counted
    #[arg(long, default_value_t = 5)]
    warmup_steps: usize,

    /// The time a configuration may take, in ms; 0 for as long as it takes [default: 5000; with --full 60000]
    #[arg(long)]
    time_budget_ms: Option<f64>,

    /// Let each query see the keys up to its own position only (as --module always does)
    #[arg(long)]
    causal: bool,

    /// The dtype of inputs and weights
    #[arg(long, value_enum, default_value = "f32")]
    dtype: DTypeFlag,

    /// The whole grid: on two cores most of an hour
    #[arg(long)]
    full: bool,

    /// Time causal self-attention with its four projections instead of attention alone
    #[arg(long)]
    module: bool,

    /// With --module, the width; several allowed [default: 256 1024 4096; with --full 8192 and 16384 too]
    #[arg(long, num_args = 1.., value_delimiter = ',', requires = "module")]
    d_model: Vec<usize>,

    /// Draw time and memory over the sequence length, into this SVG file
    #[arg(long)]
    plot: Option<PathBuf>,

    /// The memory that may be used, in GiB [default: five sixths of what is available]
    #[arg(long)]
    memory_limit_gib: Option<f64>,

    #[command(flatten)]
    output: Output,

    #[command(flatten)]
    common: Common,
}

#[derive(Clone, Copy, ValueEnum)]
enum DTypeFlag {
    F32,
    F16,
    Bf16,
    F64,
}

impl DTypeFlag {
    fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::F16 => DType::F16,
            Self::Bf16 => DType::BF16,
            Self::F64 => DType::F64,
        }
    }
}

fn main() -> ExitCode {
    let flags = Flags::parse();
    common::run(|| flags.common.under_policy(|| flags.run()))
}

impl Flags {
    fn run(&self) -> Result<()> {
        self.output.check()?;
        let plot = Output {
            output: self.plot.clone(),
            ..self.output.clone()
        };
        plot.check()?;
        let device = self.common.device()?;
        let sampling = self.sampling(&device);
        let runs = self.runs(&sampling);
        let mut rows = Vec::new();
        for (i, run) in runs.iter().enumerate() {
            common::progress(format!("{}/{} {}", i + 1, runs.len(), run.title()));
            rows.extend(run.run(&device)?);
        }

        let analysis = Analysis::of(&rows, self.width_key());
        let limits = grid::limits(&runs);
        let mut report = Report {
            environment: self.common.environment(&device),
            configuration: self.configuration(&sampling),
            columns: columns::columns(self.module),
            lines: columns::lines(&rows, &analysis, self.width_key()),
            notes: self.notes(&rows, &analysis, &limits),
            ..Default::default()
        };
        report
            .environment
            .insert("reference ops", common::fallbacks());
        if let Ok(serde_json::Value::Object(parts)) = serde_json::to_value(&analysis) {
            report.analysis = parts.into_iter().collect();
        }
        let limits = serde_json::to_value(&limits).unwrap_or_default();
        report.analysis.insert("limits", limits);
        if let Some(path) = &self.plot {
            figure(&rows, self.width_key(), self.width_name()).save_svg(path)?;
        }
        report.rows = rows;
        self.output.publish(&report)
    }

    fn sampling(&self, device: &Device) -> Sampling {
        let default_budget_ms = if self.full { 60_000.0 } else { 5_000.0 };
        let budget_ms = self.time_budget_ms.unwrap_or(default_budget_ms);
        let limit_bytes = self
            .memory_limit_gib
            .map(|gib| (gib * 2f64.powi(30)) as u64);
        Sampling {
            warmup_steps: self.warmup_steps,
            iterations: self.iterations,
            time_budget_ms: (budget_ms > 0.0).then_some(budget_ms),
            seed: self.common.seed,
            peak_flops: tallow::device::measure_peak_flops(device, self.dtype.dtype()),
            available_bytes: limit_bytes.or_else(|| usable_bytes(device)),
        }
    }

    fn configuration(&self, sampling: &Sampling) -> Fields {
        let mut fields = Fields::new();
        let what = if self.module {
            "causal self-attention with q, k, v and output projections, no positions"
        } else {
            "attention on q, k, v (B, H, T, d), inputs of standard deviation 1"
        };
        fields.insert("measured", what);
        fields.insert("batch size", self.batch_size);
        fields.insert("heads", self.heads);
        fields.insert(
            "mask",
            if self.module || self.causal {
                "causal"
            } else {
                "full"
            },
        );
        fields.insert("dtype", self.dtype.dtype().as_str());
        fields.insert("warm-up", sampling.warmup_steps);
        fields.insert("iterations", sampling.iterations);
        fields.insert("time budget ms", sampling.time_budget_ms);
        fields.insert("memory limit", sampling.available_bytes.map(format_mib));
        fields.insert(
            "peak for MFU",
            sampling
                .peak_flops
                .map(|peak| format!("{:.0} GFLOP/s in f32, measured", peak / 1e9)),
        );
        fields
    }

    fn notes(&self, rows: &[Fields], analysis: &Analysis, limits: &[Limit]) -> Vec<String> {
        let mut notes = vec![
            "Times are mean ± standard deviation over n passes; forward keeps its graph, backward starts from ones; \
             each phase is timed itself."
                .to_string(),
        ];
        let fewer = |row: &Fields| {
            let n = row.get("n").and_then(|n| n.as_u64());
            n.is_some_and(|n| n < self.iterations as u64)
        };
        if rows.iter().any(fewer) {
            notes.push(format!(
                "Where n is below {}, the time budget ended the measurement.",
                self.iterations
            ));
        }
        notes.extend(analysis.notes(self.width_name()));
        for status in ["OOM", "unsupported", "over time budget"] {
            let rows = rows
                .iter()
                .filter(|row| row.get("status") == Some(&status.into()));
            for row in rows {
                let [name, reason] = ["implementation", "reason"]
                    .map(|key| row.get(key).and_then(|v| v.as_str()).unwrap_or_default());
                let note = format!("{name}, {status}: {reason}");
                if !notes.contains(&note) {
                    notes.push(note);
                }
            }
        }
        notes.extend(limits.iter().map(Limit::to_string));
        if rows
            .iter()
            .any(|row| row.get("noisy") == Some(&true.into()))
        {
            notes.push(
                "Some rows are noisy (IQR over 10% of the median): is the machine busy?".into(),
            );
        }
        notes
    }

    /// The field that holds the width.
    fn width_key(&self) -> &'static str {
        if self.module { "d_model" } else { "head_dim" }
    }

    /// What the tables call it.
    fn width_name(&self) -> &'static str {
        if self.module { "D" } else { "d" }
    }
}

/// What the runs may take: asked once, since nothing stays alive between them, and less a sixth of what is available,
/// since the allocator keeps some of the pages that earlier runs gave back.
fn usable_bytes(device: &Device) -> Option<u64> {
    let available_bytes = tallow::device::available_bytes().filter(|_| device.is_cpu())?;
    Some(available_bytes - available_bytes / 6)
}
