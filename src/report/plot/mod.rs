//! Charts as SVG or PNG: lines (time over sequence length, loss over steps), one chart or a [`Figure`] of several; and
//! layers stacked on each other ([`AreaChart`]: memory over time).
//!
//! ```
//! use tallow::report::plot::{Figure, LineChart, Series};
//!
//! let chart = |title: &str, points: Vec<(f64, f64)>| LineChart {
//!     title: title.into(),
//!     x_label: "step".into(),
//!     series: vec![Series::new("run", points)],
//!     ..Default::default()
//! };
//! let loss = chart("Loss", vec![(0.0, 9.2), (1.0, 7.5), (2.0, 6.9)]);
//! let rate = chart("Learning rate", vec![(0.0, 0.0), (1.0, 1e-3), (2.0, 9e-4)]);
//! let svg = Figure { charts: vec![loss, rate] }.to_svg()?;
//! assert!(svg.contains("Learning rate"));
//! # Ok::<(), tallow::Error>(())
//! ```
//!
//! In an SVG, text stays text, drawn in the viewer's own sans-serif; a PNG is drawn from it with a font of this
//! crate's. People who confuse red and green can tell the colours apart; where they run out, lines are dashed.

mod areas;
mod axis;
mod draw;

pub use areas::{AreaChart, AreaLayer, TimeSpan};

use std::path::Path;

use crate::report::picture;
use crate::report::svg::Svg;
use crate::{Error, Result};
use axis::Axis;
use draw::{CAPTION_HEIGHT, COLOURS, Frame, LEFT, Look, TICK_SIZE, WIDTH};

/// Longer lines have no markers.
const MAX_MARKERS: usize = 40;

/// One line of a [`LineChart`].
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Series {
    /// What the legend calls it.
    pub name: String,
    /// (x, y) in the order in which the line passes through them; a point with a NaN or an infinity is left out.
    pub points: Vec<(f64, f64)>,
    /// Each x that has no y, such as a size that ran out of memory: a cross at the top of the chart.
    pub crosses: Vec<f64>,
}

impl Series {
    /// A named line.
    pub fn new(name: impl Into<String>, points: Vec<(f64, f64)>) -> Self {
        Self {
            name: name.into(),
            points,
            ..Self::default()
        }
    }

    fn finite_points(&self) -> impl Iterator<Item = (f64, f64)> {
        self.points
            .iter()
            .copied()
            .filter(|(x, y)| x.is_finite() && y.is_finite())
    }
}

/// Lines over two axes, each linear or logarithmic.
///
/// ```
/// use tallow::report::plot::{LineChart, Series};
///
/// let chart = LineChart {
///     title: "Attention, forward".into(),
///     x_label: "sequence length".into(),
///     y_label: "time (ms)".into(),
///     log_x: true,
///     log_y: true,
///     series: vec![Series::new("naive", vec![(256.0, 0.18), (1024.0, 0.43), (4096.0, 9.3)])],
///     ..Default::default()
/// };
/// assert!(chart.to_svg()?.contains("sequence length"));
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LineChart {
    /// Stands above the chart.
    pub title: String,
    /// Name and unit of the horizontal axis.
    pub x_label: String,
    /// Name and unit of the vertical axis.
    pub y_label: String,
    /// Whether the horizontal axis is logarithmic.
    pub log_x: bool,
    /// Whether the vertical axis is logarithmic.
    pub log_y: bool,
    /// The lines. One whose points are all left out keeps its name in the legend, marked `no data`.
    pub series: Vec<Series>,
    /// After how many lines the colours begin again, dashed; `None` after all seven. Where the lines are two methods
    /// at four sizes each, 4 gives a size one colour and a method one dash.
    pub colours: Option<usize>,
    /// Lines of small text below the chart: what was measured, and where.
    pub caption: Vec<String>,
}

/// Charts below each other in one picture.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Figure {
    /// From top to bottom.
    pub charts: Vec<LineChart>,
}

impl LineChart {
    /// The chart as an SVG document.
    ///
    /// # Errors
    /// [`Error::Plot`] if there is not one finite point, or if a value on a logarithmic axis is zero or less.
    pub fn to_svg(&self) -> Result<String> {
        svg(std::slice::from_ref(self))
    }

    /// Draws it below `top`, and returns where it ends.
    fn draw(&self, svg: &mut Svg, top: i32) -> Result<i32> {
        let [x, y] = self.axes()?;
        let has_names = self.series.iter().any(|one| !one.name.is_empty());
        let named = self.series.iter().enumerate().filter(|_| has_names);
        let legend = named.map(|(index, one)| {
            let note = match one.finite_points().next() {
                None => " (no data)",
                Some(_) => "",
            };
            (format!("{}{note}", one.name), self.look(index))
        });
        let frame = Frame {
            title: &self.title,
            x_label: &self.x_label,
            y_label: &self.y_label,
            legend: legend.collect(), // lines without names need none
            gap: 0,
        };
        let plot = frame.draw(svg, top, x, y);
        for (index, series) in self.series.iter().enumerate() {
            let (look, points) = (self.look(index), plot.points(series.finite_points()));
            look.draw(svg, &points);
            points.iter().for_each(|point| look.mark(svg, *point));
            for x in &series.crosses {
                let earlier = self.series[..index].iter();
                let above = earlier.filter(|other| other.crosses.contains(x)).count();
                look.cross(svg, plot.below_top(*x, above as i32));
            }
        }
        for (line, text) in (0..).zip(&self.caption) {
            let at = (LEFT, plot.end + CAPTION_HEIGHT * line);
            svg.text(at, TICK_SIZE, "start", text);
        }
        Ok(plot.end + CAPTION_HEIGHT * self.caption.len() as i32)
    }

    fn look(&self, index: usize) -> Look {
        let most = COLOURS.len() - 2; // without the faint ones at both ends
        let colours = self.colours.unwrap_or(most).clamp(1, most);
        let points = self.series[index].finite_points().count();
        Look::Line {
            colour: COLOURS[1 + index % colours],
            round: index / colours,
            has_markers: (1..=MAX_MARKERS).contains(&points),
        }
    }

    fn axes(&self) -> Result<[Axis; 2]> {
        let refuse = |problem: String| Error::Plot(format!("chart {:?}{problem}", self.title));
        for series in &self.series {
            for (x, y) in series.finite_points() {
                for (log, axis, value) in [(self.log_x, "x", x), (self.log_y, "y", y)] {
                    if log && value <= 0.0 {
                        return Err(refuse(format!(
                            ": series {:?} has {axis} = {value}, and a logarithmic axis shows positive values only; \
                             leave the point out or make the axis linear",
                            series.name
                        )));
                    }
                }
            }
        }
        let points = || self.series.iter().flat_map(Series::finite_points);
        let crosses = self.series.iter().flat_map(|one| one.crosses.clone());
        if points().next().is_none() {
            return Err(refuse(format!(
                " has no finite point in its {} series; measure something first",
                self.series.len()
            )));
        }
        Ok([
            Axis::fit(points().map(|(x, _)| x).chain(crosses), self.log_x, false),
            Axis::fit(points().map(|(_, y)| y), self.log_y, true),
        ])
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
}

/// The charts below each other.
fn svg(charts: &[LineChart]) -> Result<String> {
    let (mut svg, mut end) = (Svg::new(WIDTH), 0);
    for chart in charts {
        end = chart.draw(&mut svg, end)?;
    }
    Ok(svg.finish(end))
}

impl Figure {
    /// The charts as one SVG document.
    ///
    /// # Errors
    /// [`Error::Plot`] if there is no chart, or one that [`LineChart::to_svg`] would not draw.
    pub fn to_svg(&self) -> Result<String> {
        if self.charts.is_empty() {
            return Err(Error::Plot("a figure needs a chart".into()));
        }
        svg(&self.charts)
    }

    /// Writes the figure to a file, as [`LineChart::save`] does.
    ///
    /// # Errors
    /// Those of [`to_svg`](Self::to_svg) and of [`LineChart::save`].
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        picture::save(&self.to_svg()?, path.as_ref())
    }
}
