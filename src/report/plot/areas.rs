//! Stacked area charts, with named spans of the horizontal axis.

use super::axis::Axis;
use super::draw::{
    COLOURS, FRAME, Frame, LEFT, Look, MARGIN_TOP, RIGHT, TICK_SIZE, WIDTH, draw_caption,
};
use crate::report::picture;
use crate::report::svg::{Svg, TEXT};
use crate::report::words::{fixed, group};
use crate::{Error, Result};
use std::path::Path;

/// One layer of an [`AreaChart`].
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AreaLayer {
    /// The name in the legend.
    pub name: String,
    /// The thickness of the layer at each x, constant until the next x.
    pub values: Vec<f64>,
    /// The index of its colour (0 to 8), so that several charts can draw the same thing in the same colour; `None` for
    /// the layer's own index.
    pub colour: Option<usize>,
}

/// A named span of the horizontal axis.
///
/// [`AreaChart`] has an example.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TimeSpan {
    /// The name above the plot.
    pub name: String,
    /// The start, in the unit of x.
    pub from: f64,
    /// The end, in the unit of x.
    pub to: f64,
}

/// A stacked area chart: layers that are constant from one x to the next, as for memory over time by category. The peak
/// of the sum is marked.
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
///     caption: vec!["tiny, batch 4".into()],
/// };
/// assert!(chart.to_svg()?.contains("activations"));
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AreaChart {
    /// The title above the chart.
    pub title: String,
    /// Name and unit of the horizontal axis.
    pub x_label: String,
    /// Name and unit of the vertical axis.
    pub y_label: String,
    /// The x values, in ascending order.
    pub x: Vec<f64>,
    /// The layers, from bottom to top.
    pub layers: Vec<AreaLayer>,
    /// The spans whose names are shown above the plot.
    pub spans: Vec<TimeSpan>,
    /// Lines of small text below the chart: what was measured, and where.
    pub caption: Vec<String>,
}

const SPAN_HEIGHT: i32 = 24;

impl AreaChart {
    /// Returns the chart as an SVG document.
    ///
    /// # Errors
    /// [`Error::Plot`] if `x` has fewer than two different values or is not ascending, if a layer does not have one
    /// value for each x, or if a value is negative or not finite.
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
            return refuse(
                "x must be two values or more, in ascending order and not all equal".into(),
            );
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

    /// Draws the chart, and returns its height in pixels.
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
            // Along the layer's top in steps, and back along its bottom.
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
        draw_caption(svg, plot.end, &self.caption)
    }

    /// Places the name of each span: on the lowest line if the span is wide enough for it, else on a line above,
    /// connected to the span by a line.
    fn span_names(&self, x: &Axis) -> Vec<SpanName<'_>> {
        let (first, last) = (self.x[0], self.x[self.x.len() - 1]);
        let mut taken: Vec<(i32, i32, i32)> = Vec::new(); // (line, start, end) of each name, in pixels
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
    /// Returns the style of the layer with this index. By default the lowest layer is grey, as the least interesting.
    fn look(&self, index: usize) -> Look {
        Look::Area(COLOURS[self.colour.unwrap_or(index) % COLOURS.len()])
    }
}
