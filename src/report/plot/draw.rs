//! Drawing a chart: frame, lines and areas.

use super::axis::Axis;
use super::{Chart, Series, TimeSpan};
use crate::report::svg::{Point, Svg, TEXT};
use crate::report::words::{fixed, group};

pub(super) const WIDTH: f64 = 860.0;
/// The height of a chart with one line of names above the plot.
const HEIGHT: f64 = 520.0;
const TITLE_SIZE: i32 = 24;
const LABEL_SIZE: i32 = 17;
const TICK_SIZE: i32 = 15;
/// Heights of the title, of a line of the legend or of names of spans, of the space below the plot, and of a line of
/// the caption, in pixels.
const TITLE_HEIGHT: f64 = 44.0;
const LINE_HEIGHT: f64 = 24.0;
const BOTTOM_HEIGHT: f64 = 62.0;
const CAPTION_HEIGHT: f64 = 22.0;
/// The left edge of the plot, the title and the legend.
const LEFT: f64 = 90.0;
const RIGHT: f64 = WIDTH - 34.0;
const MARGIN_TOP: f64 = 10.0;

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

/// The area in which values are drawn.
struct Plot {
    top: f64,
    bottom: f64,
    x: Axis,
    y: Axis,
}

impl Plot {
    fn points(&self, points: impl IntoIterator<Item = (f64, f64)>) -> Vec<Point> {
        let points = points.into_iter();
        let points = points.map(|(x, y)| (self.x.pixel(x), self.y.pixel(y)));
        points.collect()
    }

    fn draw_axes(&self, svg: &mut Svg, chart: &Chart) {
        let (top, bottom) = (self.top, self.bottom);
        for (value, name) in &self.x.ticks {
            let x = self.x.pixel(*value);
            svg.line(&[(x, top), (x, bottom)], GRID, 1.0, "");
            svg.text((x, bottom + 16.0), TICK_SIZE, "middle", name);
        }
        for (value, name) in &self.y.ticks {
            let y = self.y.pixel(*value);
            svg.line(&[(LEFT, y), (RIGHT, y)], GRID, 1.0, "");
            svg.text((LEFT - 8.0, y), TICK_SIZE, "end", name);
        }
        let corners = [(LEFT, top), (LEFT, bottom), (RIGHT, bottom)];
        svg.line(&corners, FRAME, 1.0, "");
        let below = (f64::midpoint(LEFT, RIGHT), bottom + 42.0);
        svg.text(below, LABEL_SIZE, "middle", &chart.x_label);
        let beside = (14.0, f64::midpoint(top, bottom));
        svg.text_upwards(beside, LABEL_SIZE, &chart.y_label);
    }
}

/// The place of a span's name above the plot.
struct Place {
    left: f64,
    right: f64,
    /// The line of names, counted from the plot upwards.
    line: i32,
}

impl Chart {
    /// Draws the chart below `start`, and returns its lower end, both in pixels.
    pub(super) fn draw(&self, svg: &mut Svg, start: f64) -> f64 {
        svg.text((LEFT, start + 22.0), TITLE_SIZE, "start", &self.title);
        let legend_end = self.draw_legend(svg, start + TITLE_HEIGHT);
        let points = self.series.iter().flat_map(Series::finite_points);
        let crosses = self.series.iter().flat_map(|one| one.crosses.clone());
        let x = points.clone().map(|(x, _)| x).chain(crosses);
        let x = Axis::fit(x, self.log_x, false, (LEFT, RIGHT));
        let places = self.span_places(&x);
        let lines = places.iter().map(|place| place.line + 1);
        let names_end = legend_end + LINE_HEIGHT * f64::from(lines.max().unwrap_or(0));
        let mut end = names_end + HEIGHT - TITLE_HEIGHT;
        let (top, bottom) = (names_end + MARGIN_TOP, end - BOTTOM_HEIGHT);
        let y: Vec<f64> = match self.stacked {
            true => vec![0.0, self.peak().1],
            false => points.map(|(_, y)| y).collect(),
        };
        let y = Axis::fit(y.into_iter(), self.log_y, true, (bottom, top));
        let plot = Plot { top, bottom, x, y };
        plot.draw_axes(svg, self);
        match self.stacked {
            true => self.draw_areas(svg, &plot),
            false => self.draw_lines(svg, &plot),
        }
        self.draw_spans(svg, &plot, &places);
        if self.stacked {
            self.mark_peak(svg, &plot);
        }
        for text in &self.caption {
            svg.text((LEFT, end), TICK_SIZE, "start", text);
            end += CAPTION_HEIGHT;
        }
        end
    }

    /// Draws the legend below `top` if a series has a name, and returns its lower end.
    fn draw_legend(&self, svg: &mut Svg, top: f64) -> f64 {
        if self.series.iter().all(|one| one.name.is_empty()) {
            return top;
        }
        let sample = if self.stacked { 14.0 } else { 32.0 };
        let (mut left, mut middle) = (LEFT, top + LINE_HEIGHT / 2.0);
        for (index, series) in self.series.iter().enumerate() {
            let has_data = series.finite_points().next().is_some();
            let name = series.name.clone() + if has_data { "" } else { " (no data)" };
            let width = sample + 30.0 + 9.0 * name.chars().count() as f64;
            if left > LEFT && left + width > WIDTH {
                (left, middle) = (LEFT, middle + LINE_HEIGHT);
            }
            if self.stacked {
                svg.square((left, middle), sample, self.colour(index));
            } else {
                self.draw_line(svg, index, &[(left, middle), (left + sample, middle)]);
                self.mark(svg, index, (left + sample / 2.0, middle));
            }
            svg.text((left + sample + 8.0, middle), LABEL_SIZE, "start", &name);
            left += width;
        }
        middle + LINE_HEIGHT / 2.0
    }

    fn draw_lines(&self, svg: &mut Svg, plot: &Plot) {
        for (index, series) in self.series.iter().enumerate() {
            let points = plot.points(series.finite_points());
            self.draw_line(svg, index, &points);
            points.iter().for_each(|at| self.mark(svg, index, *at));
            for cross in &series.crosses {
                let earlier = self.series[..index].iter();
                let above = earlier.filter(|other| other.crosses.contains(cross));
                let (x, y) = (
                    plot.x.pixel(*cross),
                    plot.top + 12.0 + 14.0 * above.count() as f64,
                );
                for slope in [-5.0, 5.0] {
                    let ends = [(x - 5.0, y - slope), (x + 5.0, y + slope)];
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
            let outline = steps(&above)
                .into_iter()
                .chain(steps(&below).into_iter().rev());
            svg.area(&plot.points(outline), self.colour(index));
            below = above;
        }
    }

    fn mark_peak(&self, svg: &mut Svg, plot: &Plot) {
        let (x, sum) = self.peak();
        let (x, y) = (plot.x.pixel(x), plot.y.pixel(sum));
        let (side, anchor) = match 2.0 * x > LEFT + RIGHT {
            true => (-8.0, "end"),
            false => (8.0, "start"),
        };
        svg.marker((x, y), TEXT);
        let label = format!("peak {}", group(&fixed(sum, 1)));
        svg.text((x + side, y - 8.0), TICK_SIZE, anchor, &label);
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
    fn span_places(&self, x: &Axis) -> Vec<Place> {
        let mut places: Vec<Place> = Vec::new();
        for span in &self.spans {
            let width = 8.0 * span.name.chars().count() as f64;
            let [from, to] = edges(span, x);
            let left = f64::midpoint(from, to - width);
            let left = left.min(RIGHT - width).max(LEFT);
            let right = left + width;
            let is_free = |line: &i32| {
                let mut others = places.iter().filter(|other| other.line == *line);
                others.all(|other| right + 8.0 < other.left || other.right + 8.0 < left)
            };
            let line = match to - from > width {
                true => 0,
                false => (1..).find(is_free).unwrap_or(1),
            };
            places.push(Place { left, right, line });
        }
        places
    }

    fn draw_spans(&self, svg: &mut Svg, plot: &Plot, places: &[Place]) {
        for (span, place) in self.spans.iter().zip(places) {
            let [from, to] = edges(span, &plot.x);
            for x in [from, to] {
                svg.line(&[(x, plot.top), (x, plot.bottom)], TEXT, 1.0, "");
            }
            let middle = plot.top - 4.0 - LINE_HEIGHT * (f64::from(place.line) + 0.5);
            svg.text((place.left, middle), TICK_SIZE, "start", &span.name);
            if place.line > 0 {
                let x = f64::midpoint(from, to);
                let ends = [(x, middle + LINE_HEIGHT / 2.0 - 2.0), (x, plot.top)];
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

/// Returns the pixels of a span's edges, within the plot.
fn edges(span: &TimeSpan, x: &Axis) -> [f64; 2] {
    [span.from, span.to].map(|edge| x.pixel(edge).clamp(LEFT, RIGHT))
}

/// Returns the corners of steps through points, each of which holds until the next x.
fn steps(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let pairs = points.windows(2);
    let corners = pairs.flat_map(|pair| [pair[0], (pair[1].0, pair[0].1)]);
    corners.chain(points.last().copied()).collect()
}
