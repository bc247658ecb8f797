//! Charts as SVG or PNG: lines (time over sequence length, loss over steps) and stacked areas (memory over time).
//!
//! SVG files keep text as text, drawn in the viewer's sans-serif font. PNG files are rendered with a font compiled into
//! this crate. The colours remain distinct with red-green colour blindness; when they run out, lines are dashed.

mod axis;
mod draw;

use std::path::Path;

use crate::report::picture;
use crate::report::svg::Svg;
use crate::{Error, Result};

/// One line or area of a [`Chart`], which has an example.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Series {
    /// The name in the legend.
    pub name: String,
    /// Points (x, y) in drawing order. Lines leave out points with a coordinate that is NaN or infinite.
    pub points: Vec<(f64, f64)>,
    /// Each x that has no y, such as a size that ran out of memory: a cross at the top of the chart.
    pub crosses: Vec<f64>,
    /// The index of its colour (0 to 8), so that several charts can draw the same thing in the same colour; `None` for
    /// a colour by its position.
    pub colour: Option<usize>,
}

impl Series {
    /// Creates a series with a name.
    pub fn new(name: impl Into<String>, points: Vec<(f64, f64)>) -> Self {
        Self {
            name: name.into(),
            points,
            ..Self::default()
        }
    }

    fn finite_points(&self) -> impl Iterator<Item = (f64, f64)> + Clone {
        let points = self.points.iter().copied();
        points.filter(|(x, y)| x.is_finite() && y.is_finite())
    }
}

/// A named span of the horizontal axis of a [`Chart`], such as a phase.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TimeSpan {
    /// The name above the plot.
    pub name: String,
    /// The start, in the unit of x.
    pub from: f64,
    /// The end, in the unit of x.
    pub to: f64,
}

/// A chart of lines, or of stacked areas with a mark at their peak.
///
/// ```
/// use tallow::report::plot::{self, Chart, Series, TimeSpan};
///
/// let loss = Chart {
///     title: "Loss".into(),
///     x_label: "step".into(),
///     series: vec![Series::new("run", vec![(0.0, 9.2), (1.0, 7.5), (2.0, 6.9)])],
///     ..Default::default()
/// };
/// let memory = Chart {
///     title: "A step".into(),
///     x_label: "time (ms)".into(),
///     y_label: "alive (MiB)".into(),
///     stacked: true,
///     series: vec![
///         Series::new("weights", vec![(0.0, 4.0), (1.0, 4.0), (2.0, 4.0)]),
///         Series::new("activations", vec![(0.0, 0.0), (1.0, 3.0), (2.0, 1.0)]),
///     ],
///     spans: vec![TimeSpan { name: "forward".into(), from: 0.0, to: 2.0 }],
///     caption: vec!["tiny, batch 4".into()],
///     ..Default::default()
/// };
/// let svg = plot::to_svg(&[loss, memory])?; // one below the other
/// assert!(svg.contains("Loss") && svg.contains("peak 7.0"));
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Chart {
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
    /// Whether the series are areas on top of each other, each constant from one x to the next. All of them have the
    /// same x, in ascending order.
    pub stacked: bool,
    /// The lines, or the areas from bottom to top. A line without finite points stays in the legend, marked `no data`.
    pub series: Vec<Series>,
    /// The number of lines after which colours repeat, dashed; `None` for all seven. For two methods at four sizes
    /// each, 4 gives each size a colour and each method a dash pattern.
    pub colours: Option<usize>,
    /// The spans whose names are shown above the plot.
    pub spans: Vec<TimeSpan>,
    /// Lines of small text below the chart: what was measured, and where.
    pub caption: Vec<String>,
}

/// Returns the charts, one below the other, as one SVG document.
///
/// # Errors
/// [`Error::Plot`] if there are no charts, if one has no finite point, or if a value on a logarithmic axis is zero or
/// less; for stacked areas also if they do not have the same x, if these are not ascending or not two different ones,
/// and if a value is negative or not finite.
pub fn to_svg(charts: &[Chart]) -> Result<String> {
    if charts.is_empty() {
        return Err(Error::Plot("a figure needs a chart".into()));
    }
    let (mut svg, mut end) = (Svg::new(draw::WIDTH), 0.0);
    for chart in charts {
        let refused = |problem| Error::Plot(format!("chart {:?}: {problem}", chart.title));
        chart.check().map_err(refused)?;
        end = chart.draw(&mut svg, end);
    }
    Ok(svg.finish(end))
}

/// Writes the charts to a file atomically, one below the other: as PNG if the path ends in `.png`, else as SVG.
///
/// # Errors
/// Those of [`to_svg`]; [`Error::Io`] with the path if it cannot be written; [`Error::Plot`] for PNG in a build without
/// the feature `png`.
pub fn save(charts: &[Chart], path: impl AsRef<Path>) -> Result<()> {
    picture::save(&to_svg(charts)?, path.as_ref())
}

impl Chart {
    /// Returns the reason why the chart cannot be drawn as an error.
    fn check(&self) -> std::result::Result<(), String> {
        if self.stacked && !self.can_be_stacked() {
            return Err(
                "areas need finite values from 0 on a linear axis, over the same ascending x, not all equal".into(),
            );
        }
        for series in &self.series {
            for (x, y) in series.finite_points() {
                for (log, axis, value) in [(self.log_x, "x", x), (self.log_y, "y", y)] {
                    if log && value <= 0.0 {
                        return Err(format!(
                            "series {:?} has {axis} = {value}, and a logarithmic axis shows positive values only; \
                             leave the point out or make the axis linear",
                            series.name
                        ));
                    }
                }
            }
        }
        let mut points = self.series.iter().flat_map(Series::finite_points);
        points.next().map(|_| ()).ok_or_else(|| {
            let count = self.series.len();
            format!("no finite point in its {count} series; measure something first")
        })
    }

    fn can_be_stacked(&self) -> bool {
        let x = |area: &Series| -> Vec<f64> { area.points.iter().map(|(x, _)| *x).collect() };
        let first = self.series.first().map(x).unwrap_or_default();
        let is_ascending = first.is_sorted() && first.iter().all(|x| x.is_finite());
        let is_height = |(_, y): &(f64, f64)| y.is_finite() && *y >= 0.0;
        let fits = |area: &Series| x(area) == first && area.points.iter().all(is_height);
        let has_width = first.first() != first.last();
        !self.log_y && is_ascending && has_width && self.series.iter().all(fits)
    }
}
