//! SVG documents.

use std::fmt::{Arguments, Write};

/// The colour of text.
pub(crate) const TEXT: &str = "#222222";

/// A point in pixels, from the left and from the top.
pub(crate) type Point = (f64, f64);

/// An SVG document of a fixed width. Later elements cover earlier ones.
pub(crate) struct Svg {
    width: f64,
    elements: String,
}

impl Svg {
    pub fn new(width: f64) -> Self {
        let elements = String::new();
        Self { width, elements }
    }

    /// Returns the document with this height.
    pub fn finish(self, height: f64) -> String {
        let Self { width, elements } = self;
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
             viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"#FFFFFF\"/>\n{elements}</svg>\n"
        )
    }

    /// Draws text whose start, middle or end (`anchor`) is at a point, vertically centred.
    pub fn text(&mut self, at: Point, size: i32, anchor: &str, text: &str) {
        self.turned_text(at, size, anchor, "", text);
    }

    /// Draws text that is read upwards, centred at a point.
    pub fn text_upwards(&mut self, (x, y): Point, size: i32, text: &str) {
        let turn = format!(" transform=\"rotate(-90 {x} {y})\"");
        self.turned_text((x, y), size, "middle", &turn, text);
    }

    fn turned_text(&mut self, (x, y): Point, size: i32, anchor: &str, turn: &str, text: &str) {
        // SVG's y is the baseline, which is below the middle of the letters.
        let (x, y) = (rounded(x), rounded(y + f64::from(size) * 0.35));
        let text = escaped(text);
        self.write(format_args!(
            "<text x=\"{x}\" y=\"{y}\" font-size=\"{size}\" text-anchor=\"{anchor}\" fill=\"{TEXT}\"{turn}>{text}</text>"
        ));
    }

    /// Draws a line through points. `more` is appended to the element's attributes.
    pub fn line(&mut self, points: &[Point], colour: &str, width: f64, more: &str) {
        let points = listed(points);
        self.write(format_args!(
            "<polyline points=\"{points}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"{width}\"{more}/>"
        ));
    }

    /// Fills the polygon of these points.
    pub fn area(&mut self, points: &[Point], colour: &str) {
        let points = listed(points);
        self.write(format_args!(
            "<polygon points=\"{points}\" fill=\"{colour}\"/>"
        ));
    }

    /// Fills a square, for a legend. The middle of its left side is at a point.
    pub fn square(&mut self, (left, middle): Point, side: f64, colour: &str) {
        let (right, above, below) = (left + side, middle - side / 2.0, middle + side / 2.0);
        let corners = [(left, above), (right, above), (right, below), (left, below)];
        self.area(&corners, colour);
    }

    /// Draws a dot.
    pub fn marker(&mut self, (x, y): Point, colour: &str) {
        self.write(format_args!(
            "<circle cx=\"{x}\" cy=\"{y}\" r=\"4\" fill=\"{colour}\"/>"
        ));
    }

    /// Draws a rectangle (left, top, width, height) with a tooltip, and a label inside it if `label` is not empty.
    pub fn rectangle(&mut self, sides: [f64; 4], colour: &str, tooltip: &str, label: &str) {
        let [x, y, width, height] = sides.map(rounded);
        let tooltip = escaped(tooltip);
        self.write(format_args!(
            "<g><title>{tooltip}</title><rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" \
             fill=\"{colour}\" stroke=\"#FFFFFF\" stroke-width=\"0.4\"/></g>"
        ));
        if !label.is_empty() {
            self.text((x + 3.0, y + height / 2.0), 12, "start", label);
        }
    }

    fn write(&mut self, element: Arguments<'_>) {
        let _ = writeln!(self.elements, "{element}"); // writing to a String cannot fail
    }
}

/// Rounds to a hundredth of a pixel.
fn rounded(x: f64) -> f64 {
    (x * 100.0).round() / 100.0
}

fn listed(points: &[Point]) -> String {
    let points = points.iter();
    let points = points.map(|(x, y)| format!("{},{}", rounded(*x), rounded(*y)));
    points.collect::<Vec<_>>().join(" ")
}

/// Escapes text for SVG, and replaces control characters, which XML does not allow.
fn escaped(text: &str) -> String {
    let text = text.replace(char::is_control, " ");
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    text.replace('>', "&gt;").replace('"', "&quot;")
}
