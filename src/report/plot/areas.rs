//! Areas stacked on each other, over stretches with names.

use super::axis::Axis;
use super::draw::{
    Area, Drawn, FRAME, Frame, LEFT, Legend, MARGIN_RIGHT, MARGIN_TOP, Sample, TEXT, TICK_SIZE,
    WIDTH, document, printable, text_style,
};
use crate::report::picture;
use crate::report::words::{fixed, group};
use crate::{Error, Result};
use plotters::coord::ranged1d::Ranged;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use std::path::Path;

/// One layer of an [`AreaChart`].
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AreaLayer {
    /// What the legend calls it.
    pub name: String,
    /// Its thickness at each x, from there to the next.
    pub values: Vec<f64>,
    /// Its colour, one of nine (0 to 8), so that several charts draw one thing alike; `None` for the colour of its
    /// place among the layers.
    pub colour: Option<usize>,
}

/// A stretch of the horizontal axis with a name.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TimeSpan {
    /// What it is called.
    pub name: String,
    /// Where it begins.
    pub from: f64,
    /// Where it ends.
    pub to: f64,
}

/// Layers stacked on each other, constant from one x to the next: what a sum is made of, over time. The peak of the sum
/// is marked.
///
/// ```
/// use tallow::report::plot::{AreaChart, AreaLayer, TimeSpan};
///
/// let chart = AreaChart {
///     title: "A step".into(),
///     x_label: "time (ms)".into(),
///     y_label: "alive (MiB)".into(),
///     x: vec![0.0, 1.0, 2.0],
///     layers: vec![
///         AreaLayer { name: "weights".into(), values: vec![4.0, 4.0, 4.0], colour: Some(3) },
///         AreaLayer { name: "activations".into(), values: vec![0.0, 3.0, 1.0], colour: Some(1) },
///     ],
///     spans: vec![TimeSpan { name: "forward".into(), from: 0.0, to: 2.0 }],
/// };
/// assert!(chart.to_svg()?.contains("activations"));
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AreaChart {
    /// Stands above the chart.
    pub title: String,
    /// Name and unit of the horizontal axis.
    pub x_label: String,
    /// Name and unit of the vertical axis.
    pub y_label: String,
    /// Ascending.
    pub x: Vec<f64>,
    /// From the lowest up.
    pub layers: Vec<AreaLayer>,
    /// Marked above the plot.
    pub spans: Vec<TimeSpan>,
}

const SPAN_HEIGHT: u32 = 24;

impl AreaChart {
    /// The chart as an SVG document.
    ///
    /// # Errors
    /// [`Error::Plot`] if there are no two moments, if a layer has not one value for each, or if a value is negative or
    /// not finite.
    pub fn to_svg(&self) -> Result<String> {
        self.check()?;
        let x = Axis::fit(self.x.iter().copied(), false, false);
        let (names, name_lines) = self.span_names(&x);
        let layers = self.layers.iter().enumerate();
        let entries = layers.map(|(i, layer)| (layer.name.clone(), Sample::Area(layer.colour(i))));
        let frame = Frame {
            title: &self.title,
            x_label: &self.x_label,
            y_label: &self.y_label,
            legend: Legend::lay_out(entries),
            gap: SPAN_HEIGHT * name_lines,
        };
        document(frame.height(), |root| self.draw(root, &frame, x, names))
    }

    /// Writes the chart to a file, as [`LineChart::save`](super::LineChart::save) does.
    ///
    /// # Errors
    /// Those of [`to_svg`](Self::to_svg) and of [`LineChart::save`](super::LineChart::save).
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        picture::save(&self.to_svg()?, path.as_ref())
    }

    fn check(&self) -> Result<()> {
        let refuse =
            |problem: String| Err(Error::Plot(format!("chart {:?}: {problem}", self.title)));
        let ascending = self.x.iter().all(|x| x.is_finite()) && self.x.is_sorted();
        if !ascending || self.x.first() == self.x.last() {
            return refuse("needs two moments or more, in order".into());
        }
        for layer in &self.layers {
            if layer.values.len() != self.x.len() {
                return refuse(format!(
                    "layer {:?} has {} values for {} moments",
                    layer.name,
                    layer.values.len(),
                    self.x.len()
                ));
            }
            if let Some(value) = layer.values.iter().find(|v| !v.is_finite() || **v < 0.0) {
                return refuse(format!("layer {:?} has the value {value}", layer.name));
            }
        }
        Ok(())
    }

    fn draw(&self, root: &Area<'_>, frame: &Frame<'_>, x: Axis, names: Vec<SpanName>) -> Drawn {
        let tops = self.tops();
        let most = tops.iter().flatten().copied().fold(0.0, f64::max);
        let most = if most > 0.0 { most } else { 1.0 };
        let y = Axis::fit([0.0, most].into_iter(), false, true);
        let mut plot = frame.draw(root, x, y)?;
        let mut below = &vec![0.0; self.x.len()];
        for ((index, layer), top) in self.layers.iter().enumerate().zip(&tops) {
            // Along its top in steps, and back along its bottom.
            let bottom = steps(&self.x, below).into_iter().rev();
            let outline: Vec<_> = steps(&self.x, top).into_iter().chain(bottom).collect();
            plot.draw_series([Polygon::new(outline, layer.colour(index).filled())])?;
            below = top;
        }
        let (first, last) = (self.x[0], self.x[self.x.len() - 1]);
        for span in &self.spans {
            for edge in [span.from, span.to] {
                if (first..=last).contains(&edge) {
                    let line = vec![(edge, 0.0), (edge, most)];
                    plot.draw_series([PathElement::new(line, TEXT.stroke_width(1))])?;
                }
            }
        }
        let peak = tops
            .last()
            .and_then(|top| top.iter().position(|y| *y == most));
        if let Some(index) = peak {
            let at = self.x[index];
            let side = match 2.0 * at > first + last {
                true => HPos::Right,
                false => HPos::Left,
            };
            let label = format!(" peak {} ", group(&fixed(most, 1)));
            let style = text_style(TICK_SIZE).pos(Pos::new(side, VPos::Bottom));
            plot.draw_series([Circle::new((at, most), 4, TEXT.filled())])?;
            plot.draw_series([Text::new(label, (at, most), style)])?;
        }
        let top_height = frame.top_height() as i32;
        for name in names {
            let line = (SPAN_HEIGHT * name.line) as i32;
            let middle = top_height + 6 - line - SPAN_HEIGHT as i32 / 2;
            root.draw_text(&name.name, &text_style(TICK_SIZE), (name.left, middle))?;
            if line > 0 {
                let below = middle + SPAN_HEIGHT as i32 / 2 - 2;
                let ends = [below, top_height + MARGIN_TOP].map(|y| (name.span_middle, y));
                root.draw(&PathElement::new(ends, FRAME.stroke_width(1)))?;
            }
        }
        Ok(())
    }

    /// Where each span's name goes, and on how many lines: on the first where the span has room for it, else on one
    /// above, with a line down to the span.
    fn span_names(&self, x: &Axis) -> (Vec<SpanName>, u32) {
        let (first, last) = (self.x[0], self.x[self.x.len() - 1]);
        let frame = (LEFT, WIDTH as i32 - MARGIN_RIGHT);
        let mut taken: Vec<(u32, i32, i32)> = Vec::new(); // a line, from where to where
        let names = self.spans.iter().map(|span| {
            let name = printable(&span.name);
            let width = 8 * name.chars().count() as i32;
            let from = x.map(&span.from.max(first), frame);
            let to = x.map(&span.to.min(last), frame);
            let span_middle = (from + to) / 2;
            let left = (span_middle - width / 2).min(frame.1 - width).max(frame.0);
            let is_free = |line: &u32| {
                let mut taken = taken.iter().filter(|(other, ..)| other == line);
                taken.all(|(_, start, end)| left + width + 8 < *start || *end + 8 < left)
            };
            let line = match to - from > width {
                true => 0,
                false => (1..).find(is_free).unwrap_or(1),
            };
            taken.push((line, left, left + width));
            SpanName {
                name,
                left,
                line,
                span_middle,
            }
        });
        let names: Vec<SpanName> = names.collect();
        let lines = names.iter().map(|name| name.line + 1).max();
        (names, lines.unwrap_or(1))
    }

    fn tops(&self) -> Vec<Vec<f64>> {
        let mut top = vec![0.0; self.x.len()];
        let layers = self.layers.iter().map(|layer| {
            for (sum, value) in top.iter_mut().zip(&layer.values) {
                *sum += value;
            }
            top.clone()
        });
        layers.collect()
    }
}

struct SpanName {
    name: String,
    left: i32,
    line: u32,
    span_middle: i32,
}

fn steps(x: &[f64], y: &[f64]) -> Vec<(f64, f64)> {
    let mut points = Vec::with_capacity(2 * x.len());
    for (index, (&at, &value)) in x.iter().zip(y).enumerate() {
        if index > 0 {
            points.push((at, y[index - 1]));
        }
        points.push((at, value));
    }
    points
}

/// Nine that are told apart: those of Okabe and Ito with grey and purple in place of black. The first, for the lowest
/// layer, is the one of least interest.
const PALETTE: [RGBColor; 9] = [
    RGBColor(0x99, 0x99, 0x99),
    RGBColor(0x00, 0x72, 0xB2),
    RGBColor(0xD5, 0x5E, 0x00),
    RGBColor(0x00, 0x9E, 0x73),
    RGBColor(0xCC, 0x79, 0xA7),
    RGBColor(0xE6, 0x9F, 0x00),
    RGBColor(0x56, 0xB4, 0xE9),
    RGBColor(0xAA, 0x44, 0x99),
    RGBColor(0xF0, 0xE4, 0x42),
];

impl AreaLayer {
    /// The colour of the layer in the place `index`.
    fn colour(&self, index: usize) -> RGBColor {
        PALETTE[self.colour.unwrap_or(index) % PALETTE.len()]
    }
}
