//! Times attention forward and backward, naive, flash and planned side by side, with its memory, over a grid of
//! sequence lengths and head dimensions; or the layer around it, with `--module`.
//!
//! ```text
//! cargo run --example attention_benchmark
//! cargo run --example attention_benchmark -- --full --plot attention.svg
//! cargo run --example attention_benchmark -- --sequence-length 512,2048 --head-dim 64 --heads 12 --causal
//! cargo run --example attention_benchmark -- --compare naive flash planned --precision f32 bf16
//! cargo run --features cuda --example attention_benchmark -- --device cuda:0 --full --compare naive flash planned
//! cargo run --example attention_benchmark -- --module --format markdown
//! cargo run --example attention_benchmark -- --module --precision f32 bf16 --drop-casts
//! cargo run --example attention_benchmark -- --module --compare naive flash planned planned-flash --heads 1 auto
//! ```

#![deny(clippy::print_stdout, clippy::print_stderr)] // common::stdout and common::say_aside do not panic

#[path = "common/analysis/mod.rs"]
#[allow(dead_code, unused_imports)] // two examples use it, each its part
mod analysis;
#[path = "attention_benchmark/by_precision.rs"]
mod by_precision;
#[path = "attention_benchmark/columns.rs"]
mod columns;
mod common;
#[path = "attention_benchmark/grid.rs"]
mod grid;

use analysis::figure;
use candle_core::{DType, Device};
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, ValueEnum};
use common::precision::PrecisionFlags;
use common::values::TimeBudget;
use common::{Common, Effects, Output, values, words};
use grid::{Arithmetic, Group, Heads, Implementation, Run};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::ExitCode;
use tallow::Result;
use tallow::attention::Mask;
use tallow::bench::Sampling;
use tallow::report::{Fields, Report, format_mib, list_in_note};

/// Times attention forward and backward, naive, flash and planned side by side, with its memory.
///
/// Without --full the grid is one that takes under two minutes.
///
/// --precision means what it means for a model: with --module, weights and input in f32 and forward in autocast's
/// region (or, with --full-half, all in half precision); for attention alone, q, k and v in the dtype that the region
/// would hand it.
#[derive(Parser)]
#[command(version)]
struct Flags {
    /// Sequences in a batch
    #[arg(long, default_value_t = 8)]
    batch_size: usize,

    /// Attention heads, or auto for as many as make heads of 64; several allowed [default: 1; with --module auto]
    #[arg(long, num_args = 1.., value_delimiter = ',', value_name = "COUNT")]
    heads: Vec<Heads>,

    /// The dimension of a head; several allowed [default: 16 64; with --full 16 32 64 128]
    #[arg(long, num_args = 1.., value_delimiter = ',', conflicts_with = "module")]
    head_dim: Vec<usize>,

    /// Tokens in a sequence; several allowed [default: 256 1024 4096; with --full 8192 and 16384 too; with --module 16
    /// 32 64 128]
    #[arg(long, num_args = 1.., value_delimiter = ',')]
    sequence_length: Vec<usize>,

    /// naive, flash, planned, planned-flash; several allowed
    #[arg(long, value_enum, num_args = 1.., value_delimiter = ',', default_value = "naive,flash")]
    compare: Vec<Implementation>,

    /// Passes that are measured; fewer, at least 2, where the time budget ends first
    #[arg(long, default_value_t = 100, value_parser = values::count())]
    iterations: usize,

    /// Passes that are run and not counted
    #[arg(long, default_value_t = 5, value_parser = values::count_from_0())]
    warmup_steps: usize,

    /// The time a configuration may take, in ms; none for as long as it takes [default: 5000; with --full 60000]
    #[arg(long, value_parser = values::time_budget)]
    time_budget_ms: Option<TimeBudget>,

    /// Let each query see the keys up to its own position only (as --module always does)
    #[arg(long)]
    causal: bool,

    /// Let each query see so many keys up to its own position
    #[arg(long, conflicts_with_all = ["causal", "module"], value_name = "KEYS")]
    window: Option<NonZeroUsize>,

    /// Pack so many documents of one length into each sequence, which see nothing of each other
    #[arg(long, default_value_t = 1, value_parser = values::count(), conflicts_with = "module")]
    documents: usize,

    /// Drop probabilities with this probability (eager naive and flash)
    #[arg(long, default_value_t = 0.0, value_name = "P", value_parser = values::from_0, conflicts_with = "module")]
    dropout: f64,

    /// Instead of a precision, the one dtype of inputs and weights: f64, or bf16 and f16 as with --full-half
    #[arg(long, value_enum, conflicts_with_all = ["precision", "autocast", "full_half", "drop_casts"])]
    dtype: Option<DTypeFlag>,

    #[command(flatten)]
    precision: PrecisionFlags,

    /// The whole grid: on two cores most of an hour
    #[arg(long)]
    full: bool,

    /// Time causal self-attention with its four projections instead of attention alone
    #[arg(long)]
    module: bool,

    /// With --module, the width; several allowed [default: 256 1024 4096; with --full 8192 and 16384 too]
    #[arg(long, num_args = 1.., value_delimiter = ',', requires = "module")]
    d_model: Vec<usize>,

    /// Draw time and memory over the sequence length, into this file: .svg or .png
    #[arg(long, value_parser = values::picture())]
    plot: Option<PathBuf>,

    /// The memory that may be used, in GiB [default: five sixths of what is available]
    #[arg(long, value_parser = values::gib)]
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
    let flags = Flags::effects().parse();
    flags.check();
    common::run(|| flags.common.around(|| flags.run()))
}

impl Flags {
    /// What the flags' effects depend on.
    fn effects() -> Effects<Self> {
        Effects::<Self>::new()
            .of_output(|flags| &flags.output)
            .only(
                "with --module",
                &["d-model", "autocast", "full-half", "drop-casts"],
                |flags| flags.module,
            )
            .only("without --module, which is causal", &["causal"], |flags| {
                !flags.module
            })
            .only(
                "where a default is left that it changes: of lengths, widths or the time budget",
                &["full"],
                |flags| {
                    let widths = match flags.module {
                        true => &flags.d_model,
                        false => &flags.head_dim,
                    };
                    let is_default = [&flags.sequence_length, widths].map(Vec::is_empty);
                    let is_budget = flags.time_budget_ms.is_none();
                    is_default.contains(&true) || is_budget
                },
            )
    }

    /// Ends the program where the flags ask for what is not planned.
    fn check(&self) {
        if !self.is_any_planned() {
            return;
        }
        let conflict = match (self.dtype, self.dropout) {
            (Some(DTypeFlag::F64), _) => "--dtype f64",
            (_, 0.0) => return,
            _ => "--dropout",
        };
        let words = format!("attention is not planned with {conflict}: compare naive and flash");
        Self::command()
            .error(ErrorKind::ArgumentConflict, words)
            .exit();
    }

    fn is_any_planned(&self) -> bool {
        (self.compare.iter()).any(|implementation| implementation.is_planned())
    }

    fn run(&self) -> Result<()> {
        self.output.check_with([&self.plot])?;
        self.output.check_columns([columns::columns(self.module)])?;
        let device = self.common.device()?;
        let arithmetic = self.arithmetic()?;
        let sampling = self.sampling(&device, &arithmetic);
        let groups = self.groups(&arithmetic);
        let each: Vec<Group> = groups.iter().map(|(group, _)| *group).collect();
        let runs = self.runs(&each, &sampling);
        let mut by_run = Vec::new();
        for (i, run) in runs.iter().enumerate() {
            common::progress(format!("{}/{} {}", i + 1, runs.len(), run.title()));
            by_run.push(run.run(&device)?);
        }
        let rows = by_run.concat();

        let mut report = Report {
            environment: self.common.environment(&device),
            configuration: self.configuration(&sampling, &arithmetic),
            columns: columns::columns(self.module),
            notes: self.notes(&rows),
            ..Default::default()
        };
        for (group, name) in &groups {
            self.analyse((*group, name), &runs, &by_run, &device, &mut report);
        }
        report
            .environment
            .insert("reference ops", common::fallbacks());
        report.rows = rows;
        let published = self.output.publish(&report);
        if let Some(path) = &self.plot {
            let named = |run: &Run| groups.iter().find(|(group, _)| *group == run.group);
            let rows = runs.iter().zip(&by_run).flat_map(|(run, rows)| {
                let name = named(run).map_or("", |(_, name)| name);
                by_precision::figure_rows(rows, name)
            });
            let rows: Vec<Fields> = rows.collect();
            figure(&rows, self.width_key(), self.width_name()).save(path)?;
        }
        published
    }

    /// What the flags have it computed in.
    fn arithmetic(&self) -> Result<Vec<Arithmetic>> {
        match self.dtype {
            Some(dtype) => Ok(vec![Arithmetic::Of(dtype.dtype())]),
            None => {
                let precisions = self.precision.precisions()?;
                Ok(precisions.into_iter().map(Arithmetic::As).collect())
            }
        }
    }

    /// What is analysed together, with its name: empty where there is one group.
    fn groups(&self, arithmetic: &[Arithmetic]) -> Vec<(Group, String)> {
        let heads = self.heads();
        let mut groups = Vec::new();
        for &arithmetic in arithmetic {
            for &heads in &heads {
                groups.push(Group { arithmetic, heads });
            }
        }
        let name = |group: &Group| {
            let mut parts = Vec::new();
            parts.extend((arithmetic.len() > 1).then(|| group.arithmetic.name().to_string()));
            parts.extend((heads.len() > 1).then(|| group.heads.to_string()));
            parts.join(", ")
        };
        let named = groups.iter().map(|group| (*group, name(group)));
        named.collect()
    }

    fn heads(&self) -> Vec<Heads> {
        match (&self.heads[..], self.module) {
            ([], true) => vec![Heads::Auto],
            ([], false) => vec![Heads::Count(1)],
            (heads, _) => heads.to_vec(),
        }
    }

    fn sampling(&self, device: &Device, arithmetic: &[Arithmetic]) -> Sampling {
        // Half precision is computed in f32, and held against its peak.
        let counted = match arithmetic {
            [Arithmetic::Of(DType::F64)] => DType::F64,
            _ => DType::F32,
        };
        let default_budget_ms = if self.full { 60_000.0 } else { 5_000.0 };
        let TimeBudget(time_budget_ms) = self
            .time_budget_ms
            .unwrap_or(TimeBudget(Some(default_budget_ms)));
        let limit_bytes = self.memory_limit_gib.map(common::gib_bytes);
        Sampling {
            warmup_steps: self.warmup_steps,
            iterations: self.iterations,
            time_budget_ms,
            seed: self.common.seed,
            peak_flops: tallow::hardware::measure_peak_flops(device, counted),
            available_bytes: limit_bytes.or_else(|| usable_bytes(device)),
        }
    }

    fn mask(&self) -> Mask {
        match (self.window, self.causal) {
            (Some(keys), _) => Mask::Window(keys),
            (None, true) => Mask::Causal,
            (None, false) => Mask::Full,
        }
    }

    fn configuration(&self, sampling: &Sampling, arithmetic: &[Arithmetic]) -> Fields {
        let mut fields = Fields::new();
        let what = if self.module {
            "causal self-attention with q, k, v and output projections, no positions"
        } else {
            "attention on q, k, v (B, H, T, d), inputs of standard deviation 1"
        };
        fields.insert("measured", what);
        fields.insert("batch size", self.batch_size);
        let count = |heads: &Heads| match heads {
            Heads::Auto => "as many as make 64 wide".to_string(),
            Heads::Count(count) => count.to_string(),
        };
        let heads: Vec<String> = self.heads().iter().map(count).collect();
        fields.insert("heads", heads.join(", "));
        let mask = match self.module {
            true => Mask::Causal,
            false => self.mask(),
        };
        fields.insert("mask", mask.to_string());
        fields.insert("documents", (self.documents > 1).then_some(self.documents));
        fields.insert("dropout", (self.dropout != 0.0).then_some(self.dropout));
        let names: Vec<&str> = arithmetic.iter().map(|one| one.name()).collect();
        fields.insert("precision", names.join(", "));
        fields.insert("warm-up", sampling.warmup_steps);
        fields.insert("iterations", sampling.iterations);
        let budget = sampling.time_budget_ms.map(|ms| format!("{ms} ms"));
        fields.insert("time budget", budget);
        fields.insert("memory limit", sampling.available_bytes.map(format_mib));
        fields.insert(
            "peak for MFU",
            sampling
                .peak_flops
                .map(|peak| format!("{:.0} GFLOP/s in f32, measured", peak / 1e9)),
        );
        fields
    }

    fn notes(&self, rows: &[Fields]) -> Vec<String> {
        let mut notes = vec![
            "Times are mean ± standard deviation over n passes, each phase timed itself: forward keeps its graph, \
             backward starts from ones. The speed-up is naive's F+B over the row's, by medians."
                .to_string(),
        ];
        if self.is_any_planned() {
            notes.push(PLANNED.into());
        }
        let named: Vec<(&Fields, String)> = rows.iter().zip(words::names(rows)).collect();
        let which = |is: &dyn Fn(&Fields) -> bool| {
            let names = named.iter().filter(|(row, _)| is(row));
            names.map(|(_, name)| name.clone()).collect::<Vec<_>>()
        };
        let text = |row: &Fields, key| row.get(key).and_then(|v| v.as_str()).map(String::from);
        let fewer = which(&|row| {
            let is_whole = text(row, "phase").as_deref() == Some("forward+backward");
            let n = row.get("n").and_then(|n| n.as_u64());
            is_whole && n.is_some_and(|n| n < self.iterations as u64)
        });
        if !fewer.is_empty() {
            let start = format!(
                "The time budget ended these before {} passes",
                self.iterations
            );
            notes.push(list_in_note(&start, &fewer));
        }
        let mut refused: Vec<(String, String)> = Vec::new();
        for row in rows {
            let why = text(row, "status").zip(text(row, "reason"));
            let why = why.filter(|(status, _)| !["ok", "OOM"].contains(&status.as_str()));
            refused.extend(why.filter(|why| !refused.contains(why)));
        }
        for (status, reason) in refused {
            let rows = which(&|row| text(row, "reason").as_ref() == Some(&reason));
            notes.push(list_in_note(
                &format!("Not run ({status}), {reason}"),
                &rows,
            ));
        }
        notes.extend(words::noisy(rows));
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

/// What is said of planned rows.
const PLANNED: &str = "planned is naive's mathematics and planned-flash flash's kernels, for a shape known beforehand. \
    Their peak is the whole arena, before backward what of it is read later.";

/// What the runs may take: asked once, since nothing stays alive between them, and less a sixth of what is available,
/// since the host's allocator keeps some of the pages that earlier runs gave back.
fn usable_bytes(device: &Device) -> Option<u64> {
    let available_bytes = tallow::hardware::available_bytes_on(device)?;
    Some(match device.is_cpu() {
        true => available_bytes - available_bytes / 6,
        false => available_bytes,
    })
}
