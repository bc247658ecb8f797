//! Selection and grouping of a recording's ranges for a summary.

use super::recording::{Recording, Span};
use crate::Error;
use crate::probe::{Kind, Path};

/// Filter for the ranges of a report. The default selects every op of every step.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use tallow::profile::{self, Grouping, ProfileReport, Profiler, Selection};
/// use tallow::ops;
///
/// let x = Tensor::ones((4, 8), DType::F32, &Device::Cpu)?;
/// let profiler = Profiler::start()?;
/// let y = {
///     let _range = profile::range("encoder");
///     ops::exp(&x)?
/// };
/// ops::sum(&y)?; // not in the range
/// let encoder = Selection { within: Some("encoder".into()), ..Default::default() };
/// let report = ProfileReport::new(&profiler.finish()?, &encoder, Grouping::Name)?;
/// assert_eq!(report.rows.len(), 1);
/// assert_eq!(report.rows[0].name, "exp");
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Selection {
    /// Only ranges in this phase: `forward`, `backward`, `optimizer`.
    pub phase: Option<String>,
    /// Only ranges in this part of the model: consecutive names of a path, such as `layers.0`, `attn`, `layers.3/attn`,
    /// `attn/attention::naive`.
    pub within: Option<String>,
    /// Only ranges of these kinds; empty selects ops, forward and backward.
    pub kinds: Vec<Kind>,
}

/// The key by which ranges or kernels share a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Grouping {
    /// Name. The backward of an op is another row: `linear backward`.
    #[default]
    Name,
    /// Path: the op's place in the model and its name, `layers.0/attn/q_proj/linear`. The backward of an op is another
    /// row here too.
    Path,
    /// Path without numbers: all blocks of the model share a row, `layers.*/attn/q_proj/linear`.
    Layer,
    /// Name of GPU kernels, as recorded by [`Profiler::start_on`](super::Profiler::start_on).
    Kernel,
}

impl Selection {
    /// Returns the selection of all ops in `phase`.
    pub fn phase(phase: &str) -> Self {
        Self {
            phase: Some(phase.into()),
            ..Default::default()
        }
    }

    pub(super) fn selects_kind(&self, kind: Kind) -> bool {
        match self.kinds.is_empty() {
            true => matches!(kind, Kind::Op | Kind::OpBackward),
            false => self.kinds.contains(&kind),
        }
    }

    pub(super) fn selects_place(&self, span: &Span) -> bool {
        let in_phase = self
            .phase
            .as_deref()
            .is_none_or(|phase| span.phase == phase);
        let within = self.within.as_deref();
        in_phase && within.is_none_or(|part| contains_names(span.path, part))
    }

    pub(super) fn nothing(&self, recording: &Recording) -> Error {
        let mut phases: Vec<&str> = Vec::new();
        for span in &recording.spans {
            if !span.phase.is_empty() && !phases.contains(&span.phase) {
                phases.push(span.phase);
            }
        }
        let wanted = [
            self.phase
                .as_ref()
                .map(|phase| format!(" in phase {phase:?}")),
            self.within.as_ref().map(|part| format!(" within {part:?}")),
        ];
        Error::Data {
            what: "profile report".into(),
            expected: format!("ranges{}", wanted.into_iter().flatten().collect::<String>()),
            got: format!(
                "none among {}, whose phases are [{}]",
                recording.spans.len(),
                phases.join(", ")
            ),
            hint: "paths are names with slashes between them, as Grouping::Path shows them".into(),
        }
    }
}

/// Returns whether the names of `part` are consecutive somewhere in `path`.
fn contains_names(path: Path, part: &str) -> bool {
    let names = path.names();
    let part: Vec<&str> = part.split('/').filter(|name| !name.is_empty()).collect();
    part.is_empty() || names.windows(part.len()).any(|window| window == part)
}

impl Grouping {
    pub(super) fn name_of(self, span: &Span) -> String {
        let name = match (self, span.kind) {
            (_, Kind::Step | Kind::Phase) | (Self::Name | Self::Kernel, _) => span.name(),
            (Self::Path, _) => span.path.to_string(),
            (Self::Layer, _) => {
                let names = span.path.names();
                names
                    .iter()
                    .map(|name| without_number(name))
                    .collect::<Vec<_>>()
                    .join("/")
            }
        };
        match span.kind {
            Kind::OpBackward => format!("{name} backward"),
            _ => name,
        }
    }
}

/// Replaces numbers: `layers.3` becomes `layers.*`.
fn without_number(name: &str) -> String {
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    let parts = name
        .split('.')
        .map(|part| if is_number(part) { "*" } else { part });
    parts.collect::<Vec<_>>().join(".")
}
