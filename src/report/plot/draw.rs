//! Drawing a chart: frame, lines and areas.

use super::axis::Axis;
use super::{Chart, Series};
use crate::report::svg::{self, Svg, TEXT};
use crate::report::words::{fixed, group};

pub(super) const WIDTH: i32 = 860;
/// The height of a chart with one line of names above the plot.
const HEIGHT: i32 = 520;
const TITLE_SIZE: i32 = 24;
const LABEL_SIZE: i32 = 17;
const TICK_SIZE: i32 = 15;
/// Heights of the title, of a line of the legend or of names of spans, of the space below the plot, and of a line of
/// the caption, in pixels.
const TITLE_HEIGHT: i32 = 44;
const LINE_HEIGHT: i32 = 24;
const BOTTOM_HEIGHT: i32 = 62;
const CAPTION_HEIGHT: i32 = 22;
/// The left edge of the plot, the title and the legend.
const LEFT: i32 = 90;
const RIGHT: i32 = WIDTH - 34;
const MARGIN_TOP: i32 = 10;

/// Colours that remain distinct with red-green colour blindness: those of Okabe and Ito, with grey and purple instead
/// of black. Lines do not use the grey and the yellow, which are too faint on white.
const COLOURS: [&str; 9] = [
    "#999999", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#AA4499",
    "#F0E442",
];
const FRAME: &str = "#666666";
const GRID: &str = "#E2E2E2";

/// The dash patterns of lines: solid, then those for colours that were used up once, twice and so on.
const DASHES: [&str; 5] = [
    "",
    " stroke-dasharray=\"8 4\"",
    " stroke-dasharray=\"3 4\"",
    " stroke-dasharray=\"12 4 3 4\"",
    " stroke-dasharray=\"1 6\"",
];

/// The largest number of points at which a line has markers.
const MAX_MARKERS: usize = 40;

/// A point in pixels, from the left and from the top.
type Point = svg::Point<i32>;

/// The area in which values are drawn.
struct Plot {
    top: i32,
    bottom: i32,
    x: Axis,
    y: Axis,
}

impl Plot {
    fn x(&self, x: f64) -> i32 {
        self.x.pixel(x, LEFT, RIGHT)
    }

    fn point(&self, (x, y): (f64, f64)) -> Point {
        (self.x(x), self.y.pixel(y, self.bottom, self.top))
    }

    fn points(&self, points: impl IntoIterator<Item = (f64, f64)>) -> Vec<Point> {
        points.into_iter().map(|point| self.point(point)).collect()
    }

    fn draw_axes(&self, svg: &mut Svg, chart: &Chart) {
        let (top, bottom) = (self.top, self.bottom);
        for (value, name) in self.x.ticks() {
            let x = self.x(*value);
            svg.line(&[(x, top), (x, bottom)], GRID, 1.0, "");
            svg.text((x, bottom + 16), TICK_SIZE, "middle", name);
        }
        for (value, name) in self.y.ticks() {
            let y = self.y.pixel(*value, bottom, top);
            svg.line(&[(LEFT, y), (RIGHT, y)], GRID, 1.0, "");
            svg.text((LEFT - 8, y), TICK_SIZE, "end", name);
        }
        let corners = [(LEFT, top), (LEFT, bottom), (RIGHT, bottom)];
        svg.line(&corners, FRAME, 1.0, "");
        let below = ((LEFT + RIGHT) / 2, bottom + 42);
        svg.text(below, LABEL_SIZE, "middle", &chart.x_label);
        svg.text_upwards((14, (top + bottom) / 2), LABEL_SIZE, &chart.y_label);
    }
}

/// The place of a name above the plot.
struct Place {
    left: i32,
    line: i32,
}

impl Chart {
    /// Draws the chart below `start`, and returns its lower end, both in pixels.
    pub(super) fn draw(&self, svg: &mut Svg, start: i32) -> i32 {
        let (x, y) = self.axes();
        let [legend, spans] = [self.legend(), self.spans_above(&x)];
        let [legend_lines, span_lines] = [&legend, &spans].map(|places| {
            let lines = places.iter().map(|place| place.line + 1);
            LINE_HEIGHT * lines.max().unwrap_or(0)
        });
        let names_end = start + TITLE_HEIGHT + legend_lines + span_lines;
        let end = names_end + HEIGHT - TITLE_HEIGHT;
        let plot = Plot {
            top: names_end + MARGIN_TOP,
            bottom: end - BOTTOM_HEIGHT,
            x,
            y,
        };
        svg.text((LEFT, start + 22), TITLE_SIZE, "start", &self.title);
        self.draw_legend(svg, start + TITLE_HEIGHT, &legend);
        plot.draw_axes(svg, self);
        match self.stacked {
            true => self.draw_areas(svg, &plot),
            false => self.draw_lines(svg, &plot),
        }
        self.draw_spans(svg, &plot, &spans);
        if self.stacked {
            self.mark_peak(svg, &plot);
        }
        for (line, text) in (0..).zip(&self.caption) {
            let at = (LEFT, end + CAPTION_HEIGHT * line);
            svg.text(at, TICK_SIZE, "start", text);
        }
        end + CAPTION_HEIGHT * self.caption.len() as i32
    }

    fn axes(&self) -> (Axis, Axis) {
        let points = self.series.iter().flat_map(Series::finite_points);
        let crosses = self.series.iter().flat_map(|one| one.crosses.clone());
        let x = points.clone().map(|(x, _)| x).chain(crosses);
        let y: Vec<f64> = match self.stacked {
            true if self.peak().1 > 0.0 => vec![0.0, self.peak().1],
            true => vec![0.0, 1.0],
            false => points.map(|(_, y)| y).collect(),
        };
        (
            Axis::fit(x, self.log_x, false),
            Axis::fit(y.into_iter(), self.log_y, true),
        )
    }

    /// Returns the place of each series in the legend, which is empty if no series has a name.
    fn legend(&self) -> Vec<Place> {
        let has_names = self.series.iter().any(|one| !one.name.is_empty());
        let (mut left, mut line) = (LEFT, 0);
        let places = self.series.iter().filter(|_| has_names).map(|series| {
            let characters = self.legend_name(series).chars().count();
            let width = self.sample_width() + 30 + characters as i32 * 9;
            if left > LEFT && left + width > WIDTH {
                (left, line) = (LEFT, line + 1);
            }
            left += width;
            let left = left - width;
            Place { left, line }
        });
        places.collect()
    }

    fn legend_name(&self, series: &Series) -> String {
        match series.finite_points().next() {
            None => format!("{} (no data)", series.name),
            Some(_) => series.name.clone(),
        }
    }

    /// The width of a line or an area in the legend, in pixels.
    fn sample_width(&self) -> i32 {
        if self.stacked { 14 } else { 32 }
    }

    fn draw_legend(&self, svg: &mut Svg, top: i32, places: &[Place]) {
        for (index, place) in places.iter().enumerate() {
            let middle = top + LINE_HEIGHT * place.line + LINE_HEIGHT / 2;
            let (left, right) = (place.left, place.left + self.sample_width());
            if self.stacked {
                let [above, below] = [middle - 7, middle + 7];
                let corners = [(left, above), (right, above), (right, below), (left, below)];
                svg.area(&corners, self.colour(index));
            } else {
                self.draw_line(svg, index, &[(left, middle), (right, middle)]);
                self.mark(svg, index, ((left + right) / 2, middle));
            }
            let name = self.legend_name(&self.series[index]);
            svg.text((right + 8, middle), LABEL_SIZE, "start", &name);
        }
    }

    fn draw_lines(&self, svg: &mut Svg, plot: &Plot) {
        for (index, series) in self.series.iter().enumerate() {
            let points = plot.points(series.finite_points());
            self.draw_line(svg, index, &points);
            points.iter().for_each(|at| self.mark(svg, index, *at));
            for cross in &series.crosses {
                let earlier = self.series[..index].iter();
                let above = earlier.filter(|other| other.crosses.contains(cross));
                let (x, y) = (plot.x(*cross), plot.top + 12 + 14 * above.count() as i32);
                for slope in [-5, 5] {
                    let ends = [(x - 5, y - slope), (x + 5, y + slope)];
                    svg.line(&ends, self.colour(index), 2.0, "");
                }
            }
        }
    }

    fn draw_line(&self, svg: &mut Svg, index: usize, points: &[Point]) {
        let round = index / self.line_colours();
        let dash = DASHES[round.min(DASHES.len() - 1)];
        svg.line(points, self.colour(index), 2.0, dash);
    }

    /// Draws a marker if the line has few points.
    fn mark(&self, svg: &mut Svg, index: usize, at: Point) {
        let points = self.series[index].finite_points().count();
        if (1..=MAX_MARKERS).contains(&points) {
            svg.marker(at, self.colour(index));
        }
    }

    fn draw_areas(&self, svg: &mut Svg, plot: &Plot) {
        let mut below: Vec<(f64, f64)> = self.sums(0);
        for index in 0..self.series.len() {
            let above = self.sums(index + 1);
            // Along the area's top in steps, and back along its bottom.
            let outline = steps(&above).chain(steps(&below).rev());
            svg.area(&plot.points(outline), self.colour(index));
            below = above;
        }
    }

    fn mark_peak(&self, svg: &mut Svg, plot: &Plot) {
        let peak = self.peak();
        let at = plot.point(peak);
        let (side, anchor) = match 2 * at.0 > LEFT + RIGHT {
            true => (-8, "end"),
            false => (8, "start"),
        };
        svg.marker(at, TEXT);
        let label = format!("peak {}", group(&fixed(peak.1, 1)));
        svg.text((at.0 + side, at.1 - 8), TICK_SIZE, anchor, &label);
    }

    /// Returns the sums of the lowest `count` areas.
    fn sums(&self, count: usize) -> Vec<(f64, f64)> {
        let points = self.series[0].points.iter().enumerate();
        let sum = |i: usize| self.series[..count].iter().map(|one| one.points[i].1).sum();
        points.map(|(i, (x, _))| (*x, sum(i))).collect()
    }

    /// Returns x and value of the first of the largest sums of all areas.
    fn peak(&self) -> (f64, f64) {
        let sums = self.sums(self.series.len()).into_iter();
        let peak = sums.reduce(|most, one| if one.1 > most.1 { one } else { most });
        peak.unwrap_or_default()
    }

    /// Places the name of each span: on the lowest line if the span is wide enough for it, else on a line above,
    /// connected to the span by a line.
    fn spans_above(&self, x: &Axis) -> Vec<Place> {
        let mut taken: Vec<(i32, i32, i32)> = Vec::new(); // (line, start, end) of each name, in pixels
        let places = self.spans.iter().map(|span| {
            let width = 8 * span.name.chars().count() as i32;
            let [from, to] = [span.from, span.to].map(|edge| edge_pixel(x, edge));
            let left = ((from + to - width) / 2).min(RIGHT - width).max(LEFT);
            let is_free = |line: &i32| {
                let mut taken = taken.iter().filter(|(other, ..)| other == line);
                taken.all(|(_, start, end)| left + width + 8 < *start || *end + 8 < left)
            };
            let line = match to - from > width {
                true => 0,
                false => (1..).find(is_free).unwrap_or(1),
            };
            taken.push((line, left, left + width));
            Place { left, line }
        });
        places.collect()
    }

    fn draw_spans(&self, svg: &mut Svg, plot: &Plot, places: &[Place]) {
        for (span, place) in self.spans.iter().zip(places) {
            let edges = [span.from, span.to].map(|edge| edge_pixel(&plot.x, edge));
            for x in edges {
                svg.line(&[(x, plot.top), (x, plot.bottom)], TEXT, 1.0, "");
            }
            let middle = plot.top - 4 - LINE_HEIGHT * place.line - LINE_HEIGHT / 2;
            svg.text((place.left, middle), TICK_SIZE, "start", &span.name);
            if place.line > 0 {
                let x = (edges[0] + edges[1]) / 2;
                let ends = [(x, middle + LINE_HEIGHT / 2 - 2), (x, plot.top)];
                svg.line(&ends, FRAME, 1.0, "");
            }
        }
    }

    /// Returns the colour of a series. By default the lowest area is grey, as the least interesting.
    fn colour(&self, index: usize) -> &'static str {
        let by_position = match self.stacked {
            true => index,
            false => 1 + index % self.line_colours(),
        };
        COLOURS[self.series[index].colour.unwrap_or(by_position) % COLOURS.len()]
    }

    fn line_colours(&self) -> usize {
        let most = COLOURS.len() - 2; // without the faint colours at both ends
        self.colours.unwrap_or(most).clamp(1, most)
    }
}

/// Returns the pixel of a span's edge, within the plot.
fn edge_pixel(x: &Axis, edge: f64) -> i32 {
    x.pixel(edge, LEFT, RIGHT).clamp(LEFT, RIGHT)
}

/// Returns the corners of steps through points, each of which holds until the next x.
fn steps(points: &[(f64, f64)]) -> impl DoubleEndedIterator<Item = (f64, f64)> {
    let before = points.iter().take(1).chain(points);
    let pairs = points.iter().zip(before).collect::<Vec<_>>().into_iter();
    pairs.flat_map(|(own, before)| [(own.0, before.1), *own])
}
