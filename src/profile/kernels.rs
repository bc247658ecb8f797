//! What ran on a GPU: kernels, by name, with what launched them.

use super::recording::{Recording, Span};
use super::row::{Launches, Row};
use super::selection::{Grouping, Selection};
use super::tree::Tree;
use crate::Result;
use crate::probe::Parts;
use crate::report::Statistics;
use std::collections::HashMap;

#[derive(Default)]
struct Group {
    samples_ns: Vec<u64>,
    parts: Parts,
    shapes: HashMap<Shape, usize>,
    ops: HashMap<String, usize>,
    places: HashMap<String, usize>,
}

type Shape = (Option<[u32; 3]>, Option<[u32; 3]>);

/// A row for each name, and the kernels' time.
pub(super) fn rows(
    recording: &Recording,
    tree: &Tree,
    selection: &Selection,
) -> Result<(Vec<Row>, u64)> {
    let spans = &recording.spans;
    let mut groups: HashMap<&str, Group> = HashMap::new();
    let mut sum_ns = 0;
    for kernel in &recording.kernels {
        let Some(at) = kernel.span.filter(|at| tree.counts(*at)) else {
            continue;
        };
        let owner = tree.op_or_itself(at, spans);
        if !selection.is_about(&spans[owner]) {
            continue;
        }
        let group = groups.entry(&kernel.name).or_default();
        sum_ns += kernel.duration_ns();
        group.samples_ns.push(kernel.duration_ns());
        group.parts += kernel.parts();
        *group.shapes.entry((kernel.grid, kernel.block)).or_default() += 1;
        let name = |grouping| launcher(&spans[owner], grouping);
        *group.ops.entry(name(Grouping::Name)).or_default() += 1;
        *group.places.entry(name(Grouping::Layer)).or_default() += 1;
    }
    let rows = groups.into_iter().map(|(name, group)| group.row(name));
    Ok((rows.collect::<Result<_>>()?, sum_ns))
}

/// Who launched a kernel.
fn launcher(span: &Span, grouping: Grouping) -> String {
    match span.is_op() {
        true => grouping.name_of(span),
        false if span.phase.is_empty() => "candle".into(),
        false => format!("candle in {}", span.phase),
    }
}

impl Group {
    fn row(self, name: &str) -> Result<Row> {
        let samples_ms: Vec<f64> = self.samples_ns.iter().map(|&ns| ns as f64 / 1e6).collect();
        let shapes = most_frequent(self.shapes);
        let (grid, block) = shapes.first().map_or((None, None), |(shape, _)| *shape);
        Ok(Row {
            name: name.into(),
            kind: None,
            instances: samples_ms.len(),
            total_ns: self.samples_ns.iter().sum(),
            statistics: Some(Statistics::new(&samples_ms)?),
            cost: None,
            parts: self.parts,
            inside: None,
            launches: Some(Launches {
                grid,
                block,
                shapes: shapes.len(),
                ops: most_frequent(self.ops),
                places: most_frequent(self.places),
            }),
        })
    }
}

fn most_frequent<T: Ord>(counts: HashMap<T, usize>) -> Vec<(T, usize)> {
    let mut counts: Vec<_> = counts.into_iter().collect();
    counts.sort_by(|(a, m), (b, n)| n.cmp(m).then_with(|| a.cmp(b)));
    counts
}
