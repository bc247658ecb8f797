//! Areas stacked on each other, over stretches with names.

use super::axis::Axis;
use super::draw::{
    COLOURS, Drawn, FRAME, GRID, HEIGHT, LABEL_SIZE, LEFT, LEGEND_HEIGHT, MARGIN, TEXT, TICK_SIZE,
    TITLE_HEIGHT, TITLE_SIZE, WIDTH, printable, text_style,
};
use crate::report::picture;
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

/// Layers stacked on each other, constant from one x to the next: what a sum is made of, over time.
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
///         AreaLayer { name: "weights".into(), values: vec![4.0, 4.0, 4.0] },
///         AreaLayer { name: "activations".into(), values: vec![0.0, 3.0, 1.0] },
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

/// Height of a line that names spans.
const SPAN_HEIGHT: u32 = 24;
/// Between the right edge of the plot and that of the picture.
const MARGIN_RIGHT: i32 = 34;
/// Side of a layer's sample in the legend.
const SAMPLE: i32 = 14;

impl AreaChart {
    /// The chart as an SVG document.
    ///
    /// # Errors
    /// [`Error::Plot`] if there are no two moments, if a layer has not one value for each, or if a value is negative or
    /// not finite.
    pub fn to_svg(&self) -> Result<String> {
        self.check()?;
        let mut document = String::new();
        self.draw(&mut document)
            .map_err(|problem| Error::Plot(problem.to_string()))?;
        Ok(document)
    }

    /// Writes the chart to a file, which appears complete or not at all: a PNG where the path ends in `.png`, else an
    /// SVG.
    ///
    /// # Errors
    /// Those of [`to_svg`](Self::to_svg), and [`Error::Io`] with the path if it cannot be written; [`Error::Plot`] for
    /// a PNG in a build without the feature `png`.
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

    fn draw(&self, document: &mut String) -> Drawn {
        let (legend, lines) = self.legend();
        let x = Axis::fit(self.x.iter().copied(), false);
        let (names, name_lines) = self.span_names(&x);
        let names_height = SPAN_HEIGHT * name_lines;
        let top_height = TITLE_HEIGHT + LEGEND_HEIGHT * lines + names_height;
        let height = HEIGHT + LEGEND_HEIGHT * lines + names_height;
        let root = SVGBackend::with_string(document, (WIDTH, height)).into_drawing_area();
        root.fill(&WHITE)?;
        let (top, body) = root.split_vertically(top_height);
        let left_middle = Pos::new(HPos::Left, VPos::Center);
        let title = text_style(TITLE_SIZE).pos(left_middle);
        top.draw_text(&printable(&self.title), &title, (LEFT, 22))?;
        let named = text_style(LABEL_SIZE).pos(left_middle);
        for (index, left, line) in legend {
            let middle = (TITLE_HEIGHT + LEGEND_HEIGHT * line + LEGEND_HEIGHT / 2) as i32;
            let corners = [
                (left, middle - SAMPLE / 2),
                (left + SAMPLE, middle + SAMPLE / 2),
            ];
            top.draw(&Rectangle::new(corners, colour(index).filled()))?;
            let name = printable(&self.layers[index].name);
            top.draw_text(&name, &named, (left + SAMPLE + 6, middle))?;
        }

        let tops = self.tops();
        let most = tops.iter().flatten().copied().fold(0.0, f64::max);
        let most = if most > 0.0 { most } else { 1.0 };
        let y = Axis::fit([0.0, most].into_iter(), false).with_room();
        let mut plot = ChartBuilder::on(&body)
            .margin_left(MARGIN)
            .margin_right(MARGIN_RIGHT)
            .margin_top(10)
            .margin_bottom(8)
            .x_label_area_size(54)
            .y_label_area_size(LEFT - MARGIN)
            .build_cartesian_2d(x, y)?;
        plot.configure_mesh()
            .bold_line_style(GRID)
            .axis_style(FRAME)
            .label_style(text_style(TICK_SIZE))
            .axis_desc_style(text_style(LABEL_SIZE))
            .x_desc(printable(&self.x_label))
            .y_desc(printable(&self.y_label))
            .draw()?;
        let nothing = vec![0.0; self.x.len()];
        for index in 0..tops.len() {
            let below = if index == 0 {
                &nothing
            } else {
                &tops[index - 1]
            };
            let outline = outline(&self.x, below, &tops[index]);
            plot.draw_series([Polygon::new(outline, colour(index).filled())])?;
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
        let plot_top = top_height as i32 + 10;
        for SpanName {
            name,
            left,
            line,
            span_middle,
        } in names
        {
            let middle = top_height as i32 + 6 - (SPAN_HEIGHT * line + SPAN_HEIGHT / 2) as i32;
            let style = text_style(TICK_SIZE).pos(left_middle);
            root.draw_text(&name, &style, (left, middle))?;
            if line > 0 {
                let below = middle + SPAN_HEIGHT as i32 / 2 - 2;
                let leader = vec![(span_middle, below), (span_middle, plot_top)];
                root.draw(&PathElement::new(leader, FRAME.stroke_width(1)))?;
            }
        }
        root.present()?;
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

    /// Each layer's left edge and line in the legend, and how many lines there are.
    fn legend(&self) -> (Vec<(usize, i32, u32)>, u32) {
        let (mut places, mut left, mut line) = (Vec::new(), LEFT, 0);
        for (index, layer) in self.layers.iter().enumerate() {
            let width = SAMPLE + 28 + layer.name.chars().count() as i32 * 9;
            if left > LEFT && left + width > WIDTH as i32 {
                (left, line) = (LEFT, line + 1);
            }
            places.push((index, left, line));
            left += width;
        }
        (places, line + 1)
    }

    /// The upper edge of each layer.
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

/// A span's name above the plot.
struct SpanName {
    name: String,
    /// Where the name begins.
    left: i32,
    /// How many lines of names are below it.
    line: u32,
    span_middle: i32,
}

/// Around a layer: along its top in steps, and back along its bottom.
fn outline(x: &[f64], below: &[f64], above: &[f64]) -> Vec<(f64, f64)> {
    let mut points = steps(x, above);
    points.extend(steps(x, below).into_iter().rev());
    points
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

/// Of layer `index`: nine that are told apart.
fn colour(index: usize) -> RGBColor {
    const MORE: [RGBColor; 2] = [RGBColor(0xF0, 0xE4, 0x42), RGBColor(0x99, 0x99, 0x99)];
    // The first, at the bottom, is the one of least interest.
    let all = [MORE[1]].into_iter().chain(COLOURS).chain([MORE[0]]);
    all.cycle().nth(index % 9).unwrap_or(COLOURS[0])
}
