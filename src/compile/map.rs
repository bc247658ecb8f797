//! A picture of a plan's arena. Each buffer is a rectangle from its first call to its last, at its offset.

use super::buffer::{Buffer, Category};
use super::plan::Plan;
use crate::Result;
use crate::report::svg::Svg;
use crate::report::{format_mib, picture};
use std::path::Path;

const WIDTH: f64 = 1400.0;
const HEIGHT: f64 = 700.0;
const LEFT: f64 = 115.0;
const TOP: f64 = 60.0;
const MARGIN: f64 = 20.0;
const BOTTOM: f64 = 60.0;
const FONT_SIZE: i32 = 13;

impl Plan {
    /// Returns the picture as SVG: calls from left to right, the arena's bytes from top to bottom, coloured by
    /// category. A rectangle's tooltip has the buffer's name, shape, offset and calls.
    pub fn memory_map(&self) -> String {
        let mut svg = Svg::new(LEFT + WIDTH + MARGIN);
        let in_arena = self.buffers().iter().filter(|buffer| buffer.is_in_arena());
        let title = format!(
            "Arena of {}: {} buffers, {} calls",
            format_mib(self.arena_bytes()),
            in_arena.count(),
            self.calls().len(),
        );
        svg.text((LEFT, 18.0), 16, "start", &title);
        self.legend(&mut svg);
        self.phases(&mut svg);
        for buffer in self.buffers() {
            self.rectangle(&mut svg, buffer);
        }
        for quarter in 0..=4u32 {
            let y = TOP + HEIGHT * f64::from(quarter) / 4.0;
            let bytes = self.arena_bytes() * u64::from(quarter) / 4;
            svg.text((LEFT - 6.0, y), FONT_SIZE, "end", &format_mib(bytes));
        }
        svg.text_upwards((12.0, TOP + HEIGHT / 2.0), FONT_SIZE, "offset in the arena");
        svg.finish(TOP + HEIGHT + BOTTOM)
    }

    /// Writes the picture to a file, atomically: PNG if the path ends in `.png`, otherwise SVG.
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

    fn rectangle(&self, svg: &mut Svg, buffer: &Buffer) {
        let Some(range) = buffer.arena_range() else {
            return;
        };
        let per_byte = HEIGHT / self.arena_bytes().max(1) as f64;
        let (x, end) = (self.x(buffer.live.start), self.x(buffer.live.end));
        let y = TOP + range.start as f64 * per_byte;
        let (width, height) = (end - x, (range.end - range.start) as f64 * per_byte);
        let tooltip = format!(
            "{} {:?}, {}, {}: offset {}, calls {} to {}",
            buffer.name,
            buffer.shape,
            buffer.category.name(),
            format_mib(buffer.bytes()),
            range.start,
            buffer.live.start,
            buffer.live.end - 1,
        );
        svg.rectangle([x, y, width, height], colour(buffer.category), &tooltip, "");
    }

    fn legend(&self, svg: &mut Svg) {
        let mut x = LEFT;
        let shown = Category::ALL.iter().filter(|category| {
            let mut buffers = self.buffers().iter();
            buffers.any(|buffer| buffer.is_in_arena() && buffer.category == **category)
        });
        for category in shown {
            let name = category.name();
            svg.square((x, 42.0), 12.0, colour(*category));
            svg.text((x + 17.0, 42.0), FONT_SIZE, "start", name);
            x += 130.0;
        }
    }

    fn phases(&self, svg: &mut Svg) {
        let bottom = TOP + HEIGHT;
        let mut before = None;
        let mut labelled = f64::NEG_INFINITY;
        for (index, call) in self.calls().iter().enumerate() {
            if before.replace(call.phase) == Some(call.phase) {
                continue;
            }
            let x = self.x(index);
            svg.line(&[(x, TOP), (x, bottom + 8.0)], "#888888", 0.6, "");
            if x > labelled + 60.0 {
                let name = call.phase.to_string();
                svg.text((x, bottom + 18.0), FONT_SIZE, "start", &name);
                labelled = x;
            }
        }
        let below = (LEFT, bottom + 40.0);
        svg.text(below, FONT_SIZE, "start", "calls, in order of execution");
    }
}

/// Returns the colour of a category; memory timelines use the same colours. They are Okabe and Ito's, which people who
/// confuse red and green can tell apart.
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
