//! Graphs as text for Graphviz.

use super::data::{Graph, Node, Source, ValueId, ValueRef};
use std::collections::HashSet;
use std::fmt::Write;

impl Graph {
    /// Returns the graph in Graphviz's DOT language: `dot -Tsvg graph.dot -o graph.svg` draws it.
    ///
    /// Each module is a cluster inside its parent's. Each node is an ellipse with its op and its output's shape and
    /// dtype. The ellipse is dashed if the op is composed of candle's own ops, and double if the function returns its
    /// output. Each weight, input and constant is a box; a weight's box is in the module that reads it first. Each
    /// operand is an arrow, labelled with its dtype if that differs from the output's. Arrows from extra inputs, which
    /// receive no gradient, are dashed.
    ///
    /// Equal graphs give equal text.
    ///
    /// ```
    /// use candle_core::DType;
    /// use tallow::{graph, nn, probe::in_module};
    ///
    /// let up = nn::Linear::new(4, 8, graph::weights(DType::F32).pp("up"))?;
    /// let x = graph::input("x", (2, 4), DType::F32)?;
    /// let graph = graph::trace(graph::Target::Cpu, || in_module("up", || up.forward(&x)))?;
    /// assert_eq!(graph.to_dot(), r#"digraph {
    ///   v0 [label="x\n[2, 4] f32", shape=box];
    ///   subgraph cluster_0 {
    ///     label="up";
    ///     v1 [label="up.weight\n[8, 4] f32", shape=box];
    ///     v2 [label="linear\n[2, 8] f32", peripheries=2];
    ///   }
    ///   v0 -> v2;
    ///   v1 -> v2;
    /// }
    /// "#);
    /// # Ok::<(), tallow::Error>(())
    /// ```
    pub fn to_dot(&self) -> String {
        let mut picture = Picture::of(self);
        for node in self.nodes() {
            picture.draw(node);
        }
        for output in &self.outputs {
            picture.draw_from_outside(output, ""); // an output that no node reads
        }
        let mut text = String::from("digraph {\n");
        picture.model.write(1, &mut 0, &mut text);
        text + &picture.arrows + "}\n"
    }
}

struct Picture<'a> {
    graph: &'a Graph,
    model: Module<'a>,
    arrows: String,
    /// Weights, inputs and constants that have a box already.
    boxes: HashSet<ValueId>,
    /// For each value, the value that is drawn for it. A value saved for backward is drawn as its op's output.
    shown_as: Vec<ValueId>,
    returned: HashSet<ValueId>,
}

/// A cluster of the picture: a module's name, lines and submodules.
#[derive(Default)]
struct Module<'a> {
    name: &'a str,
    lines: Vec<String>,
    parts: Vec<Self>,
}

impl<'a> Picture<'a> {
    fn of(graph: &'a Graph) -> Self {
        let mut shown_as: Vec<ValueId> = (0..graph.values.len()).map(ValueId).collect();
        for node in graph.nodes() {
            for saved in &node.saved {
                shown_as[saved.value.0] = node.output;
            }
        }
        let returned = graph.outputs.iter();
        let returned = returned.map(|output| shown_as[output.value.0]);
        Self {
            graph,
            model: Module::default(),
            arrows: String::new(),
            boxes: HashSet::new(),
            returned: returned.collect(),
            shown_as,
        }
    }

    fn draw(&mut self, node: &'a Node) {
        let modules = node.path.rsplit_once('/');
        let modules = modules.map_or("", |(modules, _)| modules);
        let inputs = node.inputs.iter().map(|operand| (operand, None));
        let reads = node
            .extra_inputs
            .iter()
            .map(|operand| (operand, Some("style=dashed")));
        for (operand, style) in inputs.chain(reads) {
            self.draw_from_outside(operand, modules);
            let dtype = self.graph.value(operand.value).dtype;
            let is_other = dtype != self.graph.value(node.output).dtype;
            let label = is_other.then(|| format!("label=\"{}\"", dtype.as_str()));
            let attributes: Vec<&str> = style.into_iter().chain(label.as_deref()).collect();
            let attributes = match attributes.is_empty() {
                true => String::new(),
                false => format!(" [{}]", attributes.join(", ")),
            };
            let [from, to] = [self.shown_as[operand.value.0], node.output].map(|id| id.0);
            let _ = writeln!(self.arrows, "  v{from} -> v{to}{attributes};"); // writing to a String cannot fail
        }
        let style = if node.composed { ", style=dashed" } else { "" };
        let line = self.line(node.output, node.op, style);
        self.model.at(modules).lines.push(line);
    }

    /// Draws the box of a weight, an input or a constant, unless it has one already.
    fn draw_from_outside(&mut self, operand: &ValueRef, modules: &'a str) {
        let id = operand.value;
        let (name, modules) = match &self.graph.value(id).source {
            Source::Weight(name) if name.is_empty() => ("weight", modules),
            Source::Weight(name) => (name.as_str(), modules),
            Source::Input(name) => (name.as_str(), ""),
            Source::Constant => ("constant", modules),
            Source::Node => return,
        };
        if self.boxes.insert(id) {
            let line = self.line(id, name, ", shape=box");
            self.model.at(modules).lines.push(line);
        }
    }

    fn line(&self, id: ValueId, name: &str, style: &str) -> String {
        let value = self.graph.value(id);
        let (name, shape, dtype) = (escaped(name), &value.shape, value.dtype.as_str());
        let is_returned = self.returned.contains(&id);
        let outlines = if is_returned { ", peripheries=2" } else { "" };
        let id = id.0;
        format!("v{id} [label=\"{name}\\n{shape:?} {dtype}\"{style}{outlines}];")
    }
}

impl<'a> Module<'a> {
    /// Returns the submodule at `path`, which is added if it is new.
    fn at(&mut self, path: &'a str) -> &mut Self {
        let names = path.split('/').filter(|name| !name.is_empty());
        names.fold(self, |module, name| {
            let known = module.parts.iter().position(|part| part.name == name);
            let place = known.unwrap_or_else(|| {
                module.parts.push(Self {
                    name,
                    ..Self::default()
                });
                module.parts.len() - 1
            });
            &mut module.parts[place]
        })
    }

    fn write(&self, depth: usize, clusters: &mut usize, text: &mut String) {
        let indent = "  ".repeat(depth);
        for line in &self.lines {
            *text += &format!("{indent}{line}\n");
        }
        for part in &self.parts {
            let name = escaped(part.name);
            *text +=
                &format!("{indent}subgraph cluster_{clusters} {{\n{indent}  label=\"{name}\";\n");
            *clusters += 1;
            part.write(depth + 1, clusters, text);
            *text += &format!("{indent}}}\n");
        }
    }
}

fn escaped(name: &str) -> String {
    name.replace('\\', r"\\")
        .replace('"', "\\\"")
        .replace('\n', r"\n")
}
