//! What all charts are drawn with: title, legend, axes; and the lines of a line chart.

use plotters::coord::Shift;
use plotters::element::DashedPathElement;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::axis::Axis;
use super::{LineChart, Series};
use crate::{Error, Result};

pub(super) const WIDTH: u32 = 860;
const HEIGHT: u32 = 520;
const FONT: &str = "sans-serif";
const TITLE_SIZE: u32 = 24;
const LABEL_SIZE: u32 = 17;
pub(super) const TICK_SIZE: u32 = 15;
/// Height of the title, and of a line of the legend, in pixels.
const TITLE_HEIGHT: u32 = 44;
const LEGEND_HEIGHT: u32 = 24;
/// Left edge of the plot, of title and of legend; the first pixels are margin.
pub(super) const LEFT: i32 = 90;
const MARGIN: i32 = 10;
pub(super) const MARGIN_RIGHT: i32 = 34;
pub(super) const MARGIN_TOP: i32 = 10;
const MAX_MARKERS: usize = 40;

/// Okabe and Ito's colours without the yellow, which is too faint on white.
pub(super) const COLOURS: [RGBColor; 7] = [
    RGBColor(0x00, 0x72, 0xB2),
    RGBColor(0xD5, 0x5E, 0x00),
    RGBColor(0x00, 0x9E, 0x73),
    RGBColor(0xCC, 0x79, 0xA7),
    RGBColor(0xE6, 0x9F, 0x00),
    RGBColor(0x56, 0xB4, 0xE9),
    RGBColor(0x00, 0x00, 0x00),
];
pub(super) const TEXT: RGBColor = RGBColor(0x22, 0x22, 0x22);
pub(super) const FRAME: RGBColor = RGBColor(0x66, 0x66, 0x66);
const GRID: RGBColor = RGBColor(0xE2, 0xE2, 0xE2);

pub(super) type Drawn<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;
pub(super) type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Plot<'a> = ChartContext<'a, SVGBackend<'a>, Cartesian2d<Axis, Axis>>;

/// An SVG document of this height, as `draw` fills it.
pub(super) fn document(height: u32, draw: impl FnOnce(&Area<'_>) -> Drawn) -> Result<String> {
    let mut document = String::new();
    let drawn = || {
        let root = SVGBackend::with_string(&mut document, (WIDTH, height)).into_drawing_area();
        root.fill(&WHITE)?;
        draw(&root)?;
        Ok(root.present()?)
    };
    drawn().map_err(|problem: Box<dyn std::error::Error>| Error::Plot(problem.to_string()))?;
    Ok(document)
}

pub(super) struct Frame<'a> {
    pub title: &'a str,
    pub x_label: &'a str,
    pub y_label: &'a str,
    pub legend: Legend,
    pub gap: u32,
}

impl Frame<'_> {
    /// Height of all above the plot, in pixels.
    pub fn top_height(&self) -> u32 {
        TITLE_HEIGHT + LEGEND_HEIGHT * self.legend.lines + self.gap
    }

    /// Height with the plot, in pixels.
    pub fn height(&self) -> u32 {
        HEIGHT - TITLE_HEIGHT + self.top_height()
    }

    /// Draws it; what it returns draws in the plot.
    pub fn draw<'a>(&self, area: &Area<'a>, x: Axis, y: Axis) -> Drawn<Plot<'a>> {
        let (top, body) = area.split_vertically(self.top_height());
        let title = text_style(TITLE_SIZE);
        top.draw_text(&printable(self.title), &title, (LEFT, 22))?;
        self.legend.draw(&top)?;
        let mut plot = ChartBuilder::on(&body)
            .margin_left(MARGIN)
            .margin_right(MARGIN_RIGHT)
            .margin_top(MARGIN_TOP)
            .margin_bottom(8)
            .x_label_area_size(54)
            .y_label_area_size(LEFT - MARGIN)
            .build_cartesian_2d(x, y)?;
        let font = |size: u32| (FONT, size).into_font().color(&TEXT);
        plot.configure_mesh()
            .bold_line_style(GRID)
            .axis_style(FRAME)
            .label_style(font(TICK_SIZE))
            .axis_desc_style(font(LABEL_SIZE))
            .x_desc(printable(self.x_label))
            .y_desc(printable(self.y_label))
            .draw()?;
        Ok(plot)
    }
}

pub(super) fn svg(charts: &[&LineChart]) -> Result<String> {
    let axes: Vec<_> = charts
        .iter()
        .map(|chart| chart.axes())
        .collect::<Result<_>>()?;
    let frames: Vec<Frame<'_>> = charts.iter().map(|chart| chart.frame()).collect();
    document(frames.iter().map(Frame::height).sum(), |root| {
        let mut rest = root.clone();
        for ((chart, frame), [x, y]) in charts.iter().zip(&frames).zip(axes) {
            let (area, below) = rest.split_vertically(frame.height());
            chart.draw(frame.draw(&area, x, y)?)?;
            rest = below;
        }
        Ok(())
    })
}

impl LineChart {
    /// Lines without names need no legend.
    fn frame(&self) -> Frame<'_> {
        let has_names = self.series.iter().any(|one| !one.name.is_empty());
        let named = self.series.iter().enumerate().filter(|_| has_names);
        let entries = named.map(|(index, one)| {
            let note = match one.finite_points().next() {
                None => " (no data)",
                Some(_) => "",
            };
            let sample = Sample::Line(Look::of(index, self), has_markers(one));
            (format!("{}{note}", one.name), sample)
        });
        Frame {
            title: &self.title,
            x_label: &self.x_label,
            y_label: &self.y_label,
            legend: Legend::lay_out(entries),
            gap: 0,
        }
    }

    fn draw(&self, mut plot: Plot<'_>) -> Drawn {
        for (index, series) in self.series.iter().enumerate() {
            let points: Vec<_> = series.finite_points().collect();
            let look = Look::of(index, self);
            let (style, line) = (look.style(), points.iter().copied());
            match look.dash() {
                None => plot.draw_series(LineSeries::new(line, style))?,
                Some((dash, gap)) => {
                    plot.draw_series(DashedLineSeries::new(line, dash, gap, style))?
                }
            };
            if has_markers(series) {
                let dots = points.iter().map(|&at| Circle::new(at, 4, style.filled()));
                plot.draw_series(dots)?;
            }
        }
        Ok(())
    }
}

/// Names from left to right above the plot, where they cover nothing, on as many lines as they take.
pub(super) struct Legend {
    entries: Vec<(i32, u32, String, Sample)>,
    lines: u32,
}

pub(super) enum Sample {
    Line(Look, bool),
    Area(RGBColor),
}

impl Sample {
    fn width(&self) -> i32 {
        match self {
            Self::Line(..) => 32,
            Self::Area(_) => 14,
        }
    }
}

impl Legend {
    pub fn lay_out(named: impl Iterator<Item = (String, Sample)>) -> Self {
        let (mut entries, mut left, mut line) = (Vec::new(), LEFT, 0);
        for (name, sample) in named {
            let name = printable(&name);
            let width = sample.width() + 30 + name.chars().count() as i32 * 9;
            if left > LEFT && left + width > WIDTH as i32 {
                (left, line) = (LEFT, line + 1);
            }
            entries.push((left, line, name, sample));
            left += width;
        }
        let lines = entries.last().map_or(0, |(_, line, ..)| line + 1);
        Self { entries, lines }
    }

    fn draw(&self, area: &Area<'_>) -> Drawn {
        for (left, line, name, sample) in &self.entries {
            let (left, end) = (*left, left + sample.width());
            let middle = (TITLE_HEIGHT + LEGEND_HEIGHT * line + LEGEND_HEIGHT / 2) as i32;
            match sample {
                Sample::Area(colour) => {
                    let half = sample.width() / 2;
                    let corners = [(left, middle - half), (end, middle + half)];
                    area.draw(&Rectangle::new(corners, colour.filled()))?;
                }
                Sample::Line(look, has_marker) => {
                    let (ends, stroke) = (vec![(left, middle), (end, middle)], look.style());
                    match look.dash() {
                        None => area.draw(&PathElement::new(ends, stroke))?,
                        Some((dash, gap)) => {
                            area.draw(&DashedPathElement::new(ends, dash, gap, stroke))?
                        }
                    }
                    if *has_marker {
                        let centre = ((left + end) / 2, middle);
                        area.draw(&Circle::new(centre, 4, stroke.filled()))?;
                    }
                }
            }
            area.draw_text(name, &text_style(LABEL_SIZE), (end + 8, middle))?;
        }
        Ok(())
    }
}

fn has_markers(series: &Series) -> bool {
    (1..=MAX_MARKERS).contains(&series.finite_points().count())
}

#[derive(Clone, Copy)]
pub(super) struct Look {
    colour: RGBColor,
    /// How often the colours were used up before it.
    round: usize,
}

impl Look {
    fn of(index: usize, chart: &LineChart) -> Self {
        let colours = chart
            .colours
            .unwrap_or(COLOURS.len())
            .clamp(1, COLOURS.len());
        Self {
            colour: COLOURS[index % colours],
            round: index / colours,
        }
    }

    fn style(self) -> ShapeStyle {
        self.colour.stroke_width(2)
    }

    /// Length of dash and gap; the first round of colours is solid.
    fn dash(self) -> Option<(i32, i32)> {
        match self.round {
            0 => None,
            1 => Some((8, 4)),
            _ => Some((3, 4)),
        }
    }
}

/// Text that begins at a point, at half of its height.
pub(super) fn text_style(size: u32) -> TextStyle<'static> {
    let style = (FONT, size).into_font().color(&TEXT);
    style.pos(Pos::new(HPos::Left, VPos::Center))
}

/// XML has no control characters.
pub(super) fn printable(text: &str) -> String {
    text.replace(char::is_control, " ")
}
