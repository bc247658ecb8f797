//! The frame of charts: title, legend and axes; and the style of lines and areas.

use super::axis::Axis;
use crate::report::svg::{self, Svg};

pub(super) const WIDTH: i32 = 860;
const HEIGHT: i32 = 520;
const TITLE_SIZE: i32 = 24;
const LABEL_SIZE: i32 = 17;
pub(super) const TICK_SIZE: i32 = 15;
/// Heights of the title, of a line of the legend, and of the space below the plot, in pixels.
const TITLE_HEIGHT: i32 = 44;
const LEGEND_HEIGHT: i32 = 24;
const BOTTOM_HEIGHT: i32 = 62;
/// Height of a line of the caption, in pixels.
const CAPTION_HEIGHT: i32 = 22;
/// The left edge of the plot, the title and the legend.
pub(super) const LEFT: i32 = 90;
pub(super) const RIGHT: i32 = WIDTH - 34;
pub(super) const MARGIN_TOP: i32 = 10;

/// Colours that remain distinct with red-green colour blindness: those of Okabe and Ito, with grey and purple instead
/// of black. Lines do not use the grey and the yellow, which are too faint on white.
pub(super) const COLOURS: [&str; 9] = [
    "#999999", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#AA4499",
    "#F0E442",
];
pub(super) const FRAME: &str = "#666666";
const GRID: &str = "#E2E2E2";

/// A point in pixels, from the left and from the top.
pub(super) type Point = svg::Point<i32>;

/// The style of a line or a layer.
#[derive(Clone, Copy)]
pub(super) enum Look {
    Line {
        colour: &'static str,
        /// The number of times that the colours were used up before this line; the first round is solid.
        round: usize,
        has_markers: bool,
    },
    Area(&'static str),
}

impl Look {
    /// Draws the line or the area through these points.
    pub fn draw(self, svg: &mut Svg, points: &[Point]) {
        match self {
            Self::Area(colour) => svg.area(points, colour),
            Self::Line { colour, round, .. } => {
                let dash = match round {
                    0 => "",
                    1 => " stroke-dasharray=\"8 4\"",
                    2 => " stroke-dasharray=\"3 4\"",
                    3 => " stroke-dasharray=\"12 4 3 4\"",
                    _ => " stroke-dasharray=\"1 6\"",
                };
                svg.line(points, colour, 2.0, dash);
            }
        }
    }

    /// Draws a marker if it is a line with markers.
    pub fn mark(self, svg: &mut Svg, at: Point) {
        if let Self::Line {
            colour,
            has_markers: true,
            ..
        } = self
        {
            svg.marker(at, colour);
        }
    }

    /// Draws a cross in the line's colour.
    pub fn cross(self, svg: &mut Svg, (x, y): Point) {
        if let Self::Line { colour, .. } = self {
            svg.line(&[(x - 5, y - 5), (x + 5, y + 5)], colour, 2.0, "");
            svg.line(&[(x - 5, y + 5), (x + 5, y - 5)], colour, 2.0, "");
        }
    }

    fn width(self) -> i32 {
        match self {
            Self::Line { .. } => 32,
            Self::Area(_) => 14,
        }
    }
}

/// The frame around a plot.
pub(super) struct Frame<'a> {
    pub title: &'a str,
    pub x_label: &'a str,
    pub y_label: &'a str,
    /// Names above the plot, from left to right, on as many lines as they need.
    pub legend: Vec<(String, Look)>,
    /// Empty space above the plot, in pixels.
    pub gap: i32,
}

impl Frame<'_> {
    /// Returns the left edge, in pixels, and the line number of each name in the legend.
    fn places(&self) -> Vec<(i32, i32)> {
        let (mut left, mut line) = (LEFT, 0);
        let places = self.legend.iter().map(|(name, look)| {
            let width = look.width() + 30 + name.chars().count() as i32 * 9;
            if left > LEFT && left + width > WIDTH {
                (left, line) = (LEFT, line + 1);
            }
            left += width;
            (left - width, line)
        });
        places.collect()
    }

    /// Returns the height of everything above the plot, in pixels.
    pub fn top_height(&self) -> i32 {
        let lines = self.places().last().map_or(0, |(_, line)| line + 1);
        TITLE_HEIGHT + LEGEND_HEIGHT * lines + self.gap
    }

    /// Draws the frame below `top`, and returns the plot area.
    pub fn draw(&self, svg: &mut Svg, top: i32, x: Axis, y: Axis) -> Plot {
        svg.text((LEFT, top + 22), TITLE_SIZE, "start", self.title);
        for ((name, look), (left, line)) in self.legend.iter().zip(self.places()) {
            let middle = top + TITLE_HEIGHT + LEGEND_HEIGHT * line + LEGEND_HEIGHT / 2;
            let (end, half) = (left + look.width(), look.width() / 2);
            let [above, below] = [middle - half, middle + half];
            match look {
                Look::Line { .. } => look.draw(svg, &[(left, middle), (end, middle)]),
                Look::Area(_) => {
                    let corners = [(left, above), (end, above), (end, below), (left, below)];
                    look.draw(svg, &corners);
                }
            }
            look.mark(svg, ((left + end) / 2, middle));
            svg.text((end + 8, middle), LABEL_SIZE, "start", name);
        }
        let height = HEIGHT - TITLE_HEIGHT + self.top_height();
        let plot = Plot {
            top: top + self.top_height() + MARGIN_TOP,
            bottom: top + height - BOTTOM_HEIGHT,
            end: top + height,
            x,
            y,
        };
        plot.draw_axes(svg, self.x_label, self.y_label);
        plot
    }
}

/// The area in which values are drawn.
pub(super) struct Plot {
    top: i32,
    bottom: i32,
    x: Axis,
    y: Axis,
    /// The lower end of the chart, in pixels.
    pub end: i32,
}

/// Draws small lines of text below a chart that ends at `end`, and returns where they end.
pub(super) fn draw_caption(svg: &mut Svg, end: i32, lines: &[String]) -> i32 {
    for (line, text) in (0..).zip(lines) {
        svg.text(
            (LEFT, end + CAPTION_HEIGHT * line),
            TICK_SIZE,
            "start",
            text,
        );
    }
    end + CAPTION_HEIGHT * lines.len() as i32
}

impl Plot {
    pub fn point(&self, (x, y): (f64, f64)) -> Point {
        (
            self.x.pixel(x, LEFT, RIGHT),
            self.y.pixel(y, self.bottom, self.top),
        )
    }

    /// Returns the point at the top of the plot over `x`, in the row `row`.
    pub fn below_top(&self, x: f64, row: i32) -> Point {
        (self.x.pixel(x, LEFT, RIGHT), self.top + 12 + 14 * row)
    }

    pub fn points(&self, points: impl IntoIterator<Item = (f64, f64)>) -> Vec<Point> {
        points.into_iter().map(|point| self.point(point)).collect()
    }

    fn draw_axes(&self, svg: &mut Svg, x_label: &str, y_label: &str) {
        let (top, bottom) = (self.top, self.bottom);
        for (value, name) in self.x.ticks() {
            let x = self.x.pixel(*value, LEFT, RIGHT);
            svg.line(&[(x, top), (x, bottom)], GRID, 1.0, "");
            svg.text((x, bottom + 16), TICK_SIZE, "middle", name);
        }
        for (value, name) in self.y.ticks() {
            let y = self.y.pixel(*value, bottom, top);
            svg.line(&[(LEFT, y), (RIGHT, y)], GRID, 1.0, "");
            svg.text((LEFT - 8, y), TICK_SIZE, "end", name);
        }
        svg.line(
            &[(LEFT, top), (LEFT, bottom), (RIGHT, bottom)],
            FRAME,
            1.0,
            "",
        );
        let below = ((LEFT + RIGHT) / 2, bottom + 42);
        svg.text(below, LABEL_SIZE, "middle", x_label);
        svg.text_upwards((14, (top + bottom) / 2), LABEL_SIZE, y_label);
    }
}
