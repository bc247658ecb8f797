//! The picture itself.

use plotters::element::DashedPathElement;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::{LineChart, Panel, Series};
use crate::Error;

pub(super) const WIDTH: u32 = 860;
pub(super) const HEIGHT: u32 = 520;
const FONT: &str = "sans-serif";
pub(super) const TITLE_SIZE: u32 = 24;
pub(super) const LABEL_SIZE: u32 = 17;
pub(super) const TICK_SIZE: u32 = 15;
/// Height of the title, and of a line of the legend, in pixels.
pub(super) const TITLE_HEIGHT: u32 = 44;
pub(super) const LEGEND_HEIGHT: u32 = 24;
/// Left edge of the plot, of title and of legend; the first pixels are margin.
pub(super) const LEFT: i32 = 90;
pub(super) const MARGIN: i32 = 10;
/// Length of a line's sample in the legend.
const SWATCH: i32 = 32;
/// Lines of more points than this are drawn without markers.
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
pub(super) const GRID: RGBColor = RGBColor(0xE2, 0xE2, 0xE2);

pub(super) type Drawn = Result<(), Box<dyn std::error::Error>>;
type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

/// The panels below each other, as an SVG document.
pub(super) fn svg(panels: Vec<Panel<'_>>) -> crate::Result<String> {
    let mut document = String::new();
    draw(panels, &mut document).map_err(|problem| Error::Plot(problem.to_string()))?;
    Ok(document)
}

fn draw(panels: Vec<Panel<'_>>, document: &mut String) -> Drawn {
    let legends: Vec<Legend> = panels.iter().map(|p| Legend::lay_out(p.chart)).collect();
    let height = legends.iter().map(Legend::panel_height).sum();
    let root = SVGBackend::with_string(document, (WIDTH, height)).into_drawing_area();
    root.fill(&WHITE)?;
    let mut rest = root.clone();
    for (panel, legend) in panels.into_iter().zip(&legends) {
        let (area, below) = rest.split_vertically(legend.panel_height());
        draw_panel(panel, legend, &area)?;
        rest = below;
    }
    root.present()?;
    Ok(())
}

fn draw_panel(panel: Panel<'_>, legend: &Legend, area: &Area) -> Drawn {
    let Panel { chart, x, y } = panel;
    let (top, body) = area.split_vertically(TITLE_HEIGHT + LEGEND_HEIGHT * legend.lines);

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
        let look = Look::of(index, chart);
        let style = look.style();
        match look.dash() {
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
    look: Look,
    marker: bool,
    name: String,
}

impl Legend {
    /// Lines without names need no legend.
    fn lay_out(chart: &LineChart) -> Self {
        let (series, mut entries) = (&chart.series, Vec::new());
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
                look: Look::of(index, chart),
                marker: has_markers(one),
                name,
            });
            left += width;
        }
        let lines = line + 1;
        Self { entries, lines }
    }

    /// Height of the panel that it belongs to, in pixels.
    fn panel_height(&self) -> u32 {
        HEIGHT + LEGEND_HEIGHT * self.lines
    }

    fn draw(&self, area: &Area) -> Drawn {
        let style = text_style(LABEL_SIZE).pos(Pos::new(HPos::Left, VPos::Center));
        for entry in &self.entries {
            let middle = (TITLE_HEIGHT + LEGEND_HEIGHT * entry.line + LEGEND_HEIGHT / 2) as i32;
            let end = entry.left + SWATCH;
            let ends = vec![(entry.left, middle), (end, middle)];
            let stroke = entry.look.style();
            match entry.look.dash() {
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

/// What sets a line apart.
#[derive(Clone, Copy)]
struct Look {
    colour: RGBColor,
    /// How often the colours were used up before it.
    round: usize,
}

impl Look {
    /// Of the chart's line `index`.
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

pub(super) fn text_style(size: u32) -> TextStyle<'static> {
    (FONT, size).into_font().color(&TEXT)
}

/// XML has no control characters.
pub(super) fn printable(text: &str) -> String {
    text.replace(char::is_control, " ")
}
