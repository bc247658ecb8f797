//! Areas stacked on each other, over stretches with names.

use super::axis::Axis;
use super::draw::{COLOURS, FRAME, Frame, LEFT, Look, MARGIN_TOP, RIGHT, TICK_SIZE, WIDTH};
use crate::report::picture;
use crate::report::svg::{Svg, TEXT};
use crate::report::words::{fixed, group};
use crate::{Error, Result};
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
///
/// [`AreaChart`] has an example.
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

const SPAN_HEIGHT: i32 = 24;

impl AreaChart {
    /// The chart as an SVG document.
    ///
    /// # Errors
    /// [`Error::Plot`] if there are no two moments, if a layer has not one value for each, or if a value is negative or
    /// not finite.
    pub fn to_svg(&self) -> Result<String> {
        self.check()?;
        let mut svg = Svg::new(WIDTH);
        let end = self.draw(&mut svg);
        Ok(svg.finish(end))
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

    /// Draws it, and returns its height.
    fn draw(&self, svg: &mut Svg) -> i32 {
        let tops = self.tops();
        let most = tops.iter().flatten().copied().fold(0.0, f64::max);
        let most = if most > 0.0 { most } else { 1.0 };
        let x = Axis::fit(self.x.iter().copied(), false, false);
        let y = Axis::fit([0.0, most].into_iter(), false, true);
        let names = self.span_names(&x);
        let layers = || self.layers.iter().enumerate();
        let legend = layers().map(|(i, layer)| (layer.name.clone(), layer.look(i)));
        let frame = Frame {
            title: &self.title,
            x_label: &self.x_label,
            y_label: &self.y_label,
            legend: legend.collect(),
            gap: SPAN_HEIGHT * names.iter().map(|name| name.line + 1).max().unwrap_or(1),
        };
        let plot = frame.draw(svg, 0, x, y);
        let mut below = &vec![0.0; self.x.len()];
        for ((index, layer), top) in layers().zip(&tops) {
            // Along its top in steps, and back along its bottom.
            let bottom = steps(&self.x, below).into_iter().rev();
            let outline = steps(&self.x, top).into_iter().chain(bottom);
            layer.look(index).draw(svg, &plot.points(outline));
            below = top;
        }
        let (first, last) = (self.x[0], self.x[self.x.len() - 1]);
        let edges = self.spans.iter().flat_map(|span| [span.from, span.to]);
        for edge in edges.filter(|edge| (first..=last).contains(edge)) {
            svg.line(&plot.points([(edge, 0.0), (edge, most)]), TEXT, 1.0, "");
        }
        let peak = tops
            .last()
            .and_then(|top| top.iter().position(|y| *y == most));
        if let Some(index) = peak {
            let at = plot.point((self.x[index], most));
            let (side, anchor) = match 2 * at.0 > LEFT + RIGHT {
                true => (-8, "end"),
                false => (8, "start"),
            };
            svg.marker(at, TEXT);
            let label = format!("peak {}", group(&fixed(most, 1)));
            svg.text((at.0 + side, at.1 - 8), TICK_SIZE, anchor, &label);
        }
        let top_height = frame.top_height();
        for name in names {
            let middle = top_height + 6 - SPAN_HEIGHT * name.line - SPAN_HEIGHT / 2;
            svg.text((name.left, middle), TICK_SIZE, "start", name.name);
            if name.line > 0 {
                let ends = [middle + SPAN_HEIGHT / 2 - 2, top_height + MARGIN_TOP];
                svg.line(&ends.map(|y| (name.span_middle, y)), FRAME, 1.0, "");
            }
        }
        plot.end
    }

    /// Places the name of each span: on the first line if the span has room for it, else on one above, with a line down
    /// to the span.
    fn span_names(&self, x: &Axis) -> Vec<SpanName<'_>> {
        let (first, last) = (self.x[0], self.x[self.x.len() - 1]);
        let mut taken: Vec<(i32, i32, i32)> = Vec::new(); // a line, from where to where
        let names = self.spans.iter().map(|span| {
            let name = span.name.as_str();
            let width = 8 * name.chars().count() as i32;
            let from = x.pixel(span.from.max(first), LEFT, RIGHT);
            let to = x.pixel(span.to.min(last), LEFT, RIGHT);
            let span_middle = (from + to) / 2;
            let left = (span_middle - width / 2).min(RIGHT - width).max(LEFT);
            let is_free = |line: &i32| {
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
        names.collect()
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

struct SpanName<'a> {
    name: &'a str,
    left: i32,
    line: i32,
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

impl AreaLayer {
    /// How the layer in the place `index` is drawn: the lowest in grey, as the one of least interest.
    fn look(&self, index: usize) -> Look {
        Look::Area(COLOURS[self.colour.unwrap_or(index) % COLOURS.len()])
    }
}
