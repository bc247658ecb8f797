//! What of a recording a summary is about, and what it takes together.

use super::recording::{Recording, Span};
use crate::Error;
use crate::probe::{Kind, Path};

/// What of a recording a report is about. The default is every op of every step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Selection {
    /// Only what ran in this phase: `forward`, `backward`, `optimizer`.
    pub phase: Option<String>,
    /// Only what lies in a part of the model: names that follow each other in the path, such as `layers.0`, `attn`,
    /// `layers.3/attn`, `attn/scores`.
    pub within: Option<String>,
    /// Only these kinds; empty is ops, forward and backward.
    pub kinds: Vec<Kind>,
}

/// What gets one row together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Grouping {
    /// Ranges of one name; an op's backward is another row than its forward.
    #[default]
    Name,
    /// Ranges of one path.
    Path,
    /// Ranges of one path, but for numbers in it: all blocks together, `layers.*/attn/q_proj/linear`.
    Layer,
    /// Kernels of one name, on a GPU: by [`Profiler::start_on`](super::Profiler::start_on).
    Kernel,
}

impl Selection {
    /// What ran in `phase`.
    pub fn phase(phase: &str) -> Self {
        Self {
            phase: Some(phase.into()),
            ..Default::default()
        }
    }

    pub(super) fn takes(&self, kind: Kind) -> bool {
        match self.kinds.is_empty() {
            true => matches!(kind, Kind::Op | Kind::OpBackward),
            false => self.kinds.contains(&kind),
        }
    }

    pub(super) fn is_about(&self, span: &Span) -> bool {
        let in_phase = self
            .phase
            .as_deref()
            .is_none_or(|phase| span.phase == phase);
        let within = self.within.as_deref();
        in_phase && within.is_none_or(|part| lies_within(span.path, part))
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

/// Whether the names of `part` follow each other somewhere in `path`.
fn lies_within(path: Path, part: &str) -> bool {
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

/// `layers.*` for `layers.3`.
fn without_number(name: &str) -> String {
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    let parts = name
        .split('.')
        .map(|part| if is_number(part) { "*" } else { part });
    parts.collect::<Vec<_>>().join(".")
}
