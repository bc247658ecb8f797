//! Flame graphs: time by place in the model. Widths are times, and each rectangle is inside the one below it.

use super::balance::{Balance, LineKind};
use super::recording::Recording;
use super::tree::Tree;
use crate::Result;
use crate::report::picture;
use crate::report::svg::Svg;
use std::path::Path;

const WIDTH: f64 = 1400.0;
const MARGIN: f64 = 10.0;
const TITLE_HEIGHT: f64 = 34.0;
const ROW_HEIGHT: f64 = 19.0;
/// Width of a character of the font, rounded up.
const CHARACTER_WIDTH: f64 = 7.0;
/// Narrower rectangles are left out: they would be invisible.
const LEAST_WIDTH: f64 = 0.2;

#[derive(Default)]
struct Node {
    name: String,
    total_ns: u64,
    children: Vec<Node>,
}

impl Node {
    fn add(&mut self, names: &[String], ns: u64) {
        self.total_ns += ns;
        let [name, rest @ ..] = names else {
            return;
        };
        let place = self.children.iter().position(|child| child.name == *name);
        let place = place.unwrap_or_else(|| {
            self.children.push(Node {
                name: name.clone(),
                ..Default::default()
            });
            self.children.len() - 1
        });
        self.children[place].add(rest, ns);
    }

    fn depth(&self) -> usize {
        1 + self.children.iter().map(Node::depth).max().unwrap_or(0)
    }
}

impl Recording {
    /// Draws the steps' time as an SVG flame graph: phases, in them the model's parts and their ops, and the time of
    /// candle and unexplained time. Ops of backward are at their place in forward. Each rectangle has a tooltip with
    /// its time and share.
    ///
    /// A path that ends in `.png` gets a PNG, which has no tooltips.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io) for a path that cannot be written; an existing file stays as it was.
    /// [`Error::Plot`](crate::Error::Plot) for a PNG in a build without the feature `png`.
    pub fn save_flame_graph(&self, path: impl AsRef<Path>) -> Result<()> {
        picture::save(&self.flame_graph(), path.as_ref())
    }

    /// Returns the SVG; see [`save_flame_graph`](Self::save_flame_graph).
    pub fn flame_graph(&self) -> String {
        let balance = Balance::new(self);
        let root = self.by_place(&balance);
        Drawing {
            depth: root.depth(),
            balance,
        }
        .draw(&root)
    }

    fn by_place(&self, balance: &Balance) -> Node {
        let tree = Tree::new(self);
        let mut root = Node {
            name: "all".into(),
            ..Default::default()
        };
        let phase_name = |phase: &str| match phase {
            "" => "in no phase".to_string(),
            phase => phase.to_string(),
        };
        for (i, span) in self.spans.iter().enumerate() {
            if tree.counts(i) && span.is_op() {
                let names = [vec![phase_name(span.phase)], span.path.names()].concat();
                root.add(&names, tree.nodes[i].own_ns);
            }
        }
        for line in balance
            .lines
            .iter()
            .filter(|line| line.kind != LineKind::Ops)
        {
            let names = [phase_name(line.phase), line.kind.name().to_string()];
            root.add(&names, line.total_ns);
        }
        root
    }
}

struct Drawing {
    balance: Balance,
    depth: usize,
}

impl Drawing {
    fn draw(&self, root: &Node) -> String {
        let height = TITLE_HEIGHT + self.depth as f64 * ROW_HEIGHT + MARGIN;
        let title = match self.balance.steps {
            Some(1) => "one step".to_string(),
            Some(steps) => format!("mean of {steps} steps"),
            None => "the whole recording".to_string(),
        };
        let mut svg = Svg::new(WIDTH);
        let ms = self.balance.ms_per_step(root.total_ns);
        let title = format!("Time by place, {title}: {ms:.2} ms");
        svg.text((MARGIN, 17.0), 16, "start", &title);
        self.draw_node(&mut svg, root, 0, MARGIN, WIDTH - 2.0 * MARGIN);
        svg.finish(height)
    }

    fn draw_node(&self, svg: &mut Svg, node: &Node, level: usize, x: f64, width: f64) {
        if width < LEAST_WIDTH {
            return;
        }
        let y = TITLE_HEIGHT + (self.depth - 1 - level) as f64 * ROW_HEIGHT;
        let share = 100.0 * node.total_ns as f64 / self.balance.wall_ns.max(1) as f64;
        let (name, ms) = (&node.name, self.balance.ms_per_step(node.total_ns));
        let label = fitting(&format!("{name} {share:.1}%"), width).unwrap_or_default();
        let tooltip = format!("{name}: {ms:.3} ms, {share:.2}%");
        let sides = [x, y, width, ROW_HEIGHT - 1.0];
        svg.rectangle(sides, &colour(name), &tooltip, &label);
        let mut child_x = x;
        for child in &node.children {
            let child_width = width * child.total_ns as f64 / node.total_ns.max(1) as f64;
            self.draw_node(svg, child, level + 1, child_x, child_width);
            child_x += child_width;
        }
    }
}

/// Returns `text` if it fits, else its beginning if at least four characters do.
fn fitting(text: &str, width: f64) -> Option<String> {
    let capacity = ((width - 6.0) / CHARACTER_WIDTH).max(0.0) as usize;
    match text.chars().count() {
        count if count <= capacity => Some(text.to_string()),
        _ if capacity >= 4 => Some(text.chars().take(capacity - 1).chain(['…']).collect()),
        _ => None,
    }
}

/// Returns a light, warm colour for black text, the same for the same name; grey for time outside of ops: candle's own,
/// between the calls of a plan, idle, unexplained.
fn colour(name: &str) -> String {
    let others = [
        LineKind::GraphSort,
        LineKind::GradientSums,
        LineKind::GraphFree,
        LineKind::Plan,
        LineKind::Idle,
        LineKind::Unexplained,
    ];
    let is_other = others.iter().any(|kind| kind.name() == name);
    if name.starts_with("candle") || is_other || name == "all" {
        return "#d0d0d0".into();
    }
    let hash = name.bytes().fold(17u32, |hash, byte| {
        hash.wrapping_mul(31).wrapping_add(byte.into())
    });
    format!("hsl({}, 85%, {}%)", 15 + hash % 45, 62 + hash / 64 % 14)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_ops_have_warm_colours() {
        const GREY: &str = "#d0d0d0";
        for kind in [
            LineKind::GraphSort,
            LineKind::GradientSums,
            LineKind::GraphFree,
            LineKind::CandleForward,
            LineKind::Plan,
            LineKind::Idle,
            LineKind::Unexplained,
        ] {
            assert_eq!(colour(kind.name()), GREY, "{kind:?}");
        }
        assert_ne!(colour("linear"), GREY);
    }
}
