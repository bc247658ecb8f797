//! The runs of a sweep: every combination of sizes, batches, lengths, attention, checkpointing, precision and mode.

use super::models::{Model, ModelFlags, VariantFlags};
use super::modes::{CompileFlag, ModeFlag, executed, modes};
use super::precision::PrecisionFlags;
use super::{values, words};
use candle_core::Device;
use clap::Args;
use tallow::Result;
use tallow::bench::{EndToEnd, Execution};
use tallow::memory::Mode;
use tallow::precision::Precision;
use tallow::report::{Column, Fields};

/// Flags of every example that runs a grid of configurations. A program sets the help of `--context-length` and the
/// default of `--mode`.
#[derive(Args, Clone, Debug)]
pub struct GridFlags {
    #[command(flatten)]
    pub models: ModelFlags,

    #[command(flatten)]
    pub variants: VariantFlags,

    /// Sequences in a batch; several
    #[arg(long, num_args = 1.., value_delimiter = ',', default_value = "4", value_name = "N")]
    pub batch_size: Vec<usize>,

    /// Tokens in a sequence; several
    #[arg(long, num_args = 1.., value_delimiter = ',', value_name = "N", alias = "sequence-length")]
    pub context_length: Vec<usize>,

    #[command(flatten, next_help_heading = "Run")]
    pub precision: PrecisionFlags,

    /// forward, forward-backward, train-step, all
    #[arg(long, value_enum, hide_possible_values = true, num_args = 1.., value_delimiter = ',', value_name = "NAME", help_heading = "Run")]
    pub mode: Vec<ModeFlag>,

    /// Memory that may be used [default: what is available]
    #[arg(long, value_name = "GIB", value_parser = values::gib, help_heading = "Run")]
    pub memory_limit_gib: Option<f64>,
}

/// A configuration of a model of some size.
#[derive(Clone)]
pub struct Run {
    pub size: String,
    pub run: EndToEnd,
}

impl GridFlags {
    pub fn modes(&self) -> Vec<Mode> {
        modes(&self.mode)
    }

    /// The models, with room for the longest sequence.
    pub fn models(&self) -> Result<Vec<Model>> {
        let longest = self.context_length.iter().copied().max();
        let longest = longest.unwrap_or_default();
        self.models.models(longest, &self.variants.attention)
    }

    /// Every combination of the flags' lists in these precisions, with AdamW, without warm-up and with one step.
    pub fn runs(
        &self,
        models: &[Model],
        precisions: &[Precision],
        compile: Option<CompileFlag>,
    ) -> Vec<Run> {
        let mut runs = Vec::new();
        for Model { name, config } in models {
            let variants = self.variants.variants(config);
            for &batch_size in &self.batch_size {
                for &sequence_length in &self.context_length {
                    for config in &variants {
                        for &precision in precisions {
                            let executed = executed(compile, self.modes(), precision);
                            runs.extend(executed.into_iter().map(|(mode, execution)| Run {
                                size: name.clone(),
                                run: EndToEnd {
                                    config: config.clone(),
                                    batch_size,
                                    sequence_length,
                                    mode,
                                    precision,
                                    warmup_steps: 0,
                                    steps: 1,
                                    execution,
                                    ..Default::default()
                                },
                            }));
                        }
                    }
                }
            }
        }
        runs
    }

    /// Gives each run the memory that it may use, and prepares the process where that is tight.
    pub fn give_memory<'r>(
        &self,
        runs: impl IntoIterator<Item = &'r mut EndToEnd>,
        device: &Device,
    ) -> Result<()> {
        let mut runs: Vec<&mut EndToEnd> = runs.into_iter().collect();
        let all = runs.iter().map(|run| &**run);
        let available_bytes = super::memory::available_bytes(device, self.memory_limit_gib, all)?;
        for run in &mut runs {
            run.available_bytes = available_bytes;
        }
        Ok(())
    }
}

impl Run {
    /// The run's name in progress and in files.
    pub fn title(&self) -> String {
        let EndToEnd {
            config,
            batch_size,
            sequence_length,
            mode,
            precision,
            execution,
            ..
        } = &self.run;
        let checkpointing = match config.checkpointing.to_string() {
            none if none == "none" => String::new(),
            strategy => format!("checkpointing {strategy}, "),
        };
        let (size, attention) = (&self.size, config.attention);
        let (execution, mode) = (execution.name(), mode.name());
        format!(
            "{size} B{batch_size} T{sequence_length}, {attention}, {checkpointing}{precision}, {execution}, {mode}"
        )
    }

    /// The fields that tell runs apart.
    pub fn labels(&self) -> Fields {
        let run = &self.run;
        let mut row = Fields::from_iter([("size", self.size.as_str())]);
        row.insert("batch_size", run.batch_size)
            .insert("context_length", run.sequence_length)
            .insert("attention", run.config.attention.name())
            .insert("checkpointing", run.config.checkpointing.to_string())
            .insert("precision", run.precision.name())
            .insert("execution", run.execution.name())
            .insert("mode", run.mode.name());
        row
    }

    pub fn is_planned(&self) -> bool {
        self.run.execution == Execution::Planned
    }
}

/// The runs' names: the values in which they differ, and their mode.
pub fn names<'r>(runs: impl IntoIterator<Item = &'r Run>) -> Vec<String> {
    let labels = runs.into_iter().map(|run| {
        let mut labels = run.labels();
        labels.insert("phase", run.run.mode.name()); // names end in it
        labels
    });
    words::names(&labels.collect::<Vec<_>>())
}

/// The columns of [`Run::labels`].
pub fn label_columns() -> Vec<Column> {
    vec![
        Column::text("size", "Model"),
        Column::text("batch_size", "B"),
        Column::text("context_length", "T"),
        Column::text("attention", "Attention"),
        Column::text("checkpointing", "Checkpointing"),
        Column::text("precision", "Precision"),
        Column::text("execution", "Execution"),
        Column::text("mode", "Mode"),
    ]
}
