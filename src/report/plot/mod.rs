//! Charts as SVG or PNG: line charts (time over sequence length, loss over steps), one or a [`Figure`] of several, and
//! stacked area charts ([`AreaChart`]: memory over time).
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
//! SVG files keep text as text, drawn in the viewer's sans-serif font. PNG files are rendered with a font compiled into
//! this crate. The colours remain distinct with red-green colour blindness; when they run out, lines are dashed.

mod areas;
mod axis;
mod draw;

pub use areas::{AreaChart, AreaLayer, TimeSpan};

use std::path::Path;

use crate::report::picture;
use crate::report::svg::Svg;
use crate::{Error, Result};
use axis::Axis;
use draw::{COLOURS, Frame, Look, WIDTH, draw_caption};

/// The largest number of points at which a line has markers.
const MAX_MARKERS: usize = 40;

/// One line of a [`LineChart`].
///
/// [`LineChart`] has an example.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Series {
    /// The name in the legend.
    pub name: String,
    /// Points (x, y) in drawing order; points with a coordinate that is NaN or infinite are left out.
    pub points: Vec<(f64, f64)>,
    /// Each x that has no y, such as a size that ran out of memory: a cross at the top of the chart.
    pub crosses: Vec<f64>,
}

impl Series {
    /// Creates a named line.
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

/// A line chart; each axis is linear or logarithmic.
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
    /// The title above the chart.
    pub title: String,
    /// Name and unit of the horizontal axis.
    pub x_label: String,
    /// Name and unit of the vertical axis.
    pub y_label: String,
    /// Whether the horizontal axis is logarithmic.
    pub log_x: bool,
    /// Whether the vertical axis is logarithmic.
    pub log_y: bool,
    /// The lines. A line without finite points stays in the legend, marked `no data`.
    pub series: Vec<Series>,
    /// The number of lines after which colours repeat, dashed; `None` for all seven. For two methods at four sizes
    /// each, 4 gives each size a colour and each method a dash pattern.
    pub colours: Option<usize>,
    /// Lines of small text below the chart: what was measured, and where.
    pub caption: Vec<String>,
}

/// Several charts in one picture, one below the other.
///
/// The [module](self) has an example.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Figure {
    /// The charts, from top to bottom.
    pub charts: Vec<LineChart>,
}

impl LineChart {
    /// Returns the chart as an SVG document.
    ///
    /// # Errors
    /// [`Error::Plot`] if there is no finite point, or if a value on a logarithmic axis is zero or less.
    pub fn to_svg(&self) -> Result<String> {
        svg(std::slice::from_ref(self))
    }

    /// Draws the chart below `top`, and returns its lower end, both in pixels.
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
            legend: legend.collect(), // empty if no line has a name
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
        Ok(draw_caption(svg, plot.end, &self.caption))
    }

    fn look(&self, index: usize) -> Look {
        let most = COLOURS.len() - 2; // without the faint colours at both ends
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

    /// Writes the chart to a file atomically: as PNG if the path ends in `.png`, else as SVG.
    ///
    /// # Errors
    /// Those of [`to_svg`](Self::to_svg); [`Error::Io`] with the path if it cannot be written; [`Error::Plot`] for PNG
    /// in a build without the feature `png`.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        picture::save(&self.to_svg()?, path.as_ref())
    }
}

/// Returns the charts, one below the other, as one SVG document.
fn svg(charts: &[LineChart]) -> Result<String> {
    let (mut svg, mut end) = (Svg::new(WIDTH), 0);
    for chart in charts {
        end = chart.draw(&mut svg, end)?;
    }
    Ok(svg.finish(end))
}

impl Figure {
    /// Returns the charts as one SVG document.
    ///
    /// # Errors
    /// [`Error::Plot`] if there are no charts, or if [`LineChart::to_svg`] fails for one of them.
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
