//! The picture itself.

use plotters::element::DashedPathElement;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::{Axis, LineChart, Series};

const WIDTH: u32 = 860;
const HEIGHT: u32 = 520;
const FONT: &str = "sans-serif";
const TITLE_SIZE: u32 = 24;
const LABEL_SIZE: u32 = 17;
const TICK_SIZE: u32 = 15;
/// Height of the title, and of a line of the legend, in pixels.
const TITLE_HEIGHT: u32 = 44;
const LEGEND_HEIGHT: u32 = 24;
/// Left edge of the plot, of title and of legend; the first pixels are margin.
const LEFT: i32 = 90;
const MARGIN: i32 = 10;
/// Length of a line's sample in the legend.
const SWATCH: i32 = 32;
/// Lines of more points than this are drawn without markers.
const MAX_MARKERS: usize = 40;

/// Okabe and Ito's colours without the yellow, which is too faint on white.
const COLOURS: [RGBColor; 7] = [
    RGBColor(0x00, 0x72, 0xB2),
    RGBColor(0xD5, 0x5E, 0x00),
    RGBColor(0x00, 0x9E, 0x73),
    RGBColor(0xCC, 0x79, 0xA7),
    RGBColor(0xE6, 0x9F, 0x00),
    RGBColor(0x56, 0xB4, 0xE9),
    RGBColor(0x00, 0x00, 0x00),
];
const TEXT: RGBColor = RGBColor(0x22, 0x22, 0x22);
const FRAME: RGBColor = RGBColor(0x66, 0x66, 0x66);
const GRID: RGBColor = RGBColor(0xE2, 0xE2, 0xE2);

type Drawn = Result<(), Box<dyn std::error::Error>>;
type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

/// The SVG document. The error is the backend's.
pub(super) fn svg(
    chart: &LineChart,
    x: Axis,
    y: Axis,
) -> Result<String, Box<dyn std::error::Error>> {
    let mut document = String::new();
    draw(chart, x, y, &mut document)?;
    Ok(document)
}

fn draw(chart: &LineChart, x: Axis, y: Axis, document: &mut String) -> Drawn {
    let legend = Legend::lay_out(&chart.series);
    let head = TITLE_HEIGHT + LEGEND_HEIGHT * legend.lines;
    let root = SVGBackend::with_string(document, (WIDTH, HEIGHT + LEGEND_HEIGHT * legend.lines))
        .into_drawing_area();
    root.fill(&WHITE)?;
    let (top, body) = root.split_vertically(head);

    let title = text_style(TITLE_SIZE).pos(Pos::new(HPos::Left, VPos::Center));
    top.draw_text(&printable(&chart.title), &title, (LEFT, 22))?;
    legend.draw(&top)?;

    let mut plot = ChartBuilder::on(&body)
        .margin_left(MARGIN)
        .margin_right(34)
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
        .x_desc(printable(&chart.x_label))
        .y_desc(printable(&chart.y_label))
        .draw()?;

    for (index, series) in chart.series.iter().enumerate() {
        let points: Vec<_> = series.finite_points().collect();
        let style = line_style(index);
        match dash(index) {
            None => plot.draw_series(LineSeries::new(points.iter().copied(), style))?,
            Some((dash, gap)) => plot.draw_series(DashedLineSeries::new(
                points.iter().copied(),
                dash,
                gap,
                style,
            ))?,
        };
        if has_markers(series) {
            let dots = points.iter().map(|&at| Circle::new(at, 4, style.filled()));
            plot.draw_series(dots)?;
        }
    }
    drop(plot);
    root.present()?;
    Ok(())
}

/// Names from left to right above the plot, where they cover nothing, on as many lines as they take.
struct Legend {
    entries: Vec<Entry>,
    lines: u32,
}

struct Entry {
    left: i32,
    line: u32,
    series: usize,
    marker: bool,
    name: String,
}

impl Legend {
    /// Lines without names need no legend.
    fn lay_out(series: &[Series]) -> Self {
        let mut entries = Vec::new();
        if series.iter().all(|one| one.name.is_empty()) {
            return Self { entries, lines: 0 };
        }
        let (mut left, mut line) = (LEFT, 0);
        for (index, one) in series.iter().enumerate() {
            let mut name = printable(&one.name);
            if one.finite_points().next().is_none() {
                name.push_str(" (no data)");
            }
            let width = SWATCH + 30 + name.chars().count() as i32 * 8;
            if left > LEFT && left + width > WIDTH as i32 {
                (left, line) = (LEFT, line + 1);
            }
            entries.push(Entry {
                left,
                line,
                series: index,
                marker: has_markers(one),
                name,
            });
            left += width;
        }
        let lines = line + 1;
        Self { entries, lines }
    }

    fn draw(&self, area: &Area) -> Drawn {
        let style = text_style(LABEL_SIZE).pos(Pos::new(HPos::Left, VPos::Center));
        for entry in &self.entries {
            let middle = (TITLE_HEIGHT + LEGEND_HEIGHT * entry.line + LEGEND_HEIGHT / 2) as i32;
            let end = entry.left + SWATCH;
            let ends = vec![(entry.left, middle), (end, middle)];
            let stroke = line_style(entry.series);
            match dash(entry.series) {
                None => area.draw(&PathElement::new(ends, stroke))?,
                Some((dash, gap)) => area.draw(&DashedPathElement::new(ends, dash, gap, stroke))?,
            }
            if entry.marker {
                let centre = (entry.left + SWATCH / 2, middle);
                area.draw(&Circle::new(centre, 4, stroke.filled()))?;
            }
            area.draw_text(&entry.name, &style, (end + 8, middle))?;
        }
        Ok(())
    }
}

fn has_markers(series: &Series) -> bool {
    (1..=MAX_MARKERS).contains(&series.finite_points().count())
}

fn line_style(index: usize) -> ShapeStyle {
    COLOURS[index % COLOURS.len()].stroke_width(2)
}

/// Length of dash and gap; the first round of colours is solid.
fn dash(index: usize) -> Option<(i32, i32)> {
    match index / COLOURS.len() {
        0 => None,
        1 => Some((8, 4)),
        _ => Some((3, 4)),
    }
}

fn text_style(size: u32) -> TextStyle<'static> {
    (FONT, size).into_font().color(&TEXT)
}

/// XML has no control characters.
fn printable(text: &str) -> String {
    text.replace(char::is_control, " ")
}
