//! A plan's memory as a picture: one rectangle a buffer, from its first call to its last, where it lies in the arena.

use super::buffer::{Buffer, Category};
use super::plan::Plan;
use crate::Result;
use crate::report::format_mib;
use crate::report::picture;
use std::fmt::Write;
use std::path::Path;

const WIDTH: f64 = 1400.0;
const HEIGHT: f64 = 700.0;
const LEFT: f64 = 115.0;
const TOP: f64 = 60.0;
const MARGIN: f64 = 20.0;
const BOTTOM: f64 = 60.0;

impl Plan {
    /// The picture as SVG: calls from left to right, the arena's bytes from top to bottom, coloured by category.
    /// Pointing at a rectangle says which buffer it is, its shape, offset and calls.
    pub fn memory_map(&self) -> String {
        let mut svg = String::new();
        let height = TOP + HEIGHT + BOTTOM;
        let width = LEFT + WIDTH + MARGIN;
        // Writing to a String cannot fail.
        let _ = writeln!(
            svg,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" \
             font-size=\"13\">"
        );
        let _ = writeln!(
            svg,
            r#"<rect width="{width}" height="{height}" fill="white"/>"#
        );
        let _ = writeln!(
            svg,
            r#"<text x="{LEFT}" y="24" font-size="16">Arena of {}: {} buffers, {} calls</text>"#,
            format_mib(self.peak_bytes()),
            self.buffers()
                .iter()
                .filter(|buffer| buffer.is_in_arena())
                .count(),
            self.calls().len(),
        );
        self.legend(&mut svg);
        self.phases(&mut svg);
        for buffer in self.buffers() {
            self.rectangle(&mut svg, buffer);
        }
        for quarter in 0..=4 {
            let y = TOP + HEIGHT * f64::from(quarter) / 4.0;
            let bytes = self.peak_bytes() * u64::from(quarter as u32) / 4;
            let (x, label) = (LEFT - 6.0, format_mib(bytes));
            let _ = writeln!(
                svg,
                r#"<text x="{x}" y="{y:.1}" text-anchor="end">{label}</text>"#
            );
        }
        let middle = TOP + HEIGHT / 2.0;
        let _ = writeln!(
            svg,
            r#"<text transform="translate(16 {middle}) rotate(-90)" text-anchor="middle">place in the arena</text>"#
        );
        svg.push_str("</svg>\n");
        svg
    }

    /// Writes the picture to a file, which appears complete or not at all: a PNG where the path ends in `.png`, else an
    /// SVG.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io) for a path that cannot be written; [`Error::Plot`](crate::Error::Plot) for a PNG
    /// in a build without the feature `png`.
    pub fn save_memory_map(&self, path: impl AsRef<Path>) -> Result<()> {
        picture::save(&self.memory_map(), path.as_ref())
    }

    fn x(&self, call: usize) -> f64 {
        LEFT + WIDTH * call as f64 / self.calls().len().max(1) as f64
    }

    fn rectangle(&self, svg: &mut String, buffer: &Buffer) {
        let Some(range) = buffer.arena_range() else {
            return;
        };
        let per_byte = HEIGHT / self.peak_bytes().max(1) as f64;
        let (x, end) = (self.x(buffer.live.start), self.x(buffer.live.end));
        let y = TOP + range.start as f64 * per_byte;
        let (width, height) = (end - x, (range.end - range.start) as f64 * per_byte);
        let _ = writeln!(
            svg,
            "<rect x=\"{x:.2}\" y=\"{y:.2}\" width=\"{width:.2}\" height=\"{height:.2}\" fill=\"{}\" \
             stroke=\"white\" stroke-width=\"0.3\"><title>{} {:?}, {}, {}: offset {}, calls {} to {}</title></rect>",
            colour(buffer.category),
            buffer.name,
            buffer.shape,
            buffer.category.name(),
            format_mib(buffer.bytes()),
            range.start,
            buffer.live.start,
            buffer.live.end - 1,
        );
    }

    fn legend(&self, svg: &mut String) {
        let mut x = LEFT;
        let shown = Category::ALL.iter().filter(|category| {
            let mut buffers = self.buffers().iter();
            buffers.any(|buffer| buffer.is_in_arena() && buffer.category == **category)
        });
        for category in shown {
            let (colour, name) = (colour(*category), category.name());
            let _ = writeln!(
                svg,
                r##"<rect x="{x}" y="36" width="12" height="12" fill="{colour}"/><text x="{}" y="47">{name}</text>"##,
                x + 17.0
            );
            x += 130.0;
        }
    }

    fn phases(&self, svg: &mut String) {
        let y = TOP + HEIGHT;
        let mut before = None;
        let mut labelled = f64::NEG_INFINITY;
        for (index, call) in self.calls().iter().enumerate() {
            if before.replace(call.phase) == Some(call.phase) {
                continue;
            }
            let x = self.x(index);
            let _ = writeln!(
                svg,
                r##"<line x1="{x:.1}" y1="{TOP}" x2="{x:.1}" y2="{:.1}" stroke="#888" stroke-width="0.6"/>"##,
                y + 8.0
            );
            if x > labelled + 60.0 {
                let _ = writeln!(
                    svg,
                    r#"<text x="{x:.1}" y="{:.1}">{}</text>"#,
                    y + 22.0,
                    call.phase
                );
                labelled = x;
            }
        }
        let _ = writeln!(
            svg,
            r#"<text x="{LEFT}" y="{:.1}">calls, in order of execution</text>"#,
            y + 44.0
        );
    }
}

/// Okabe and Ito's colours, which people who confuse red and green can tell apart; for kinds of memory, those of its
/// timelines.
fn colour(category: Category) -> &'static str {
    match category {
        Category::Gradient => "#D55E00",
        Category::Activation => "#0072B2",
        Category::Temporary => "#999999",
        Category::Scratch => "#56B4E9",
        Category::Parameter => "#009E73",
        Category::WeightCopy => "#AA4499",
        Category::OptimizerState => "#E69F00",
        Category::Input => "#F0E442",
        Category::Output => "#CC79A7",
    }
}
