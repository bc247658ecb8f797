//! Linear maps of one input: `y = x W^T`, or `x W^T + b`. On a GPU in half precision they may be one product, whose
//! weights' copies lie one under the other and whose outputs lie beside each other.

use super::super::plan::BufferRange;
use super::form::{Form, Forms};
use super::gradients::Waiting;
use super::program::Program;
use super::{Job, Lower, Target, place_of};
use crate::Result;
use crate::graph::{self, Node, ValueId};
use crate::kernels::workspace;
use crate::ops::bias;
use crate::ops::lowering::{Accumulate, Named, converted};
use crate::ops::product::{self, Factor};
use candle_core::DType;

/// The linear maps of one input.
#[derive(Clone)]
pub(super) struct Maps {
    path: String,
    /// (N, D).
    pub x: graph::ValueRef,
    x_is_wanted: bool,
    /// In the order of forward.
    groups: Vec<Group>,
    dtype: DType,
    rows: usize,
    width: usize,
}

/// Maps that are one product: one, or several that are packed.
#[derive(Clone)]
struct Group {
    path: String,
    weights: Weights,
    /// (N, F) each, or one (N, n F), of which every output is a part.
    outputs: Vec<ValueId>,
    /// F of all.
    columns: usize,
    is_trained: bool,
    /// (F), of one map alone, and whether its gradient is needed.
    bias: Option<(graph::ValueRef, bool)>,
}

/// A map as a node has it.
pub(super) struct Map {
    pub path: String,
    /// Which of the node's inputs is the weight (F, D).
    pub input: usize,
    /// Which is the bias (F), if it has one.
    pub bias: Option<usize>,
    pub output: ValueId,
}

/// The weights of a product.
#[derive(Clone)]
enum Weights {
    /// The model's: one, or several whose copies lie one under the other.
    Own(Vec<ValueId>),
    /// One that is computed, a view of one, or another in each run: what its gradient is of, and what products read.
    Other([graph::ValueRef; 2]),
}

impl Weights {
    /// The weight (F, D) of one map.
    fn of(program: &Program<'_>, job: &Job<'_>, node: &Node, input: usize) -> Self {
        let weight = &node.inputs[input];
        if is_own(program, job, node, input) {
            return Self::Own(vec![weight.value]);
        }
        let dtype = |input: usize| program.graph.value(node.inputs[input].value).dtype;
        let is_copied = |input: &usize| dtype(*input) != dtype(0);
        // Copies in half precision stand first in what a node reads, in the order of their weights.
        let read = match is_copied(&input) {
            true => &node.reads[(1..input).filter(is_copied).count()],
            false => weight,
        };
        Self::Other([weight.clone(), read.clone()])
    }

    /// As products in `dtype` read them.
    fn read(&self, lower: &mut Lower<'_>, dtype: DType) -> BufferRange {
        match self {
            Self::Own(weights) => lower.product_weight(weights, dtype),
            Self::Other([_, read]) => lower.read(read),
        }
    }

    /// Writes the product of two factors in `dtype` that is their gradient, of so many rows, columns and terms.
    fn add_gradient(
        &self,
        lower: &mut Lower<'_>,
        dtype: DType,
        sizes: [usize; 3],
        factors: [(&BufferRange, bool); 2],
    ) {
        match self {
            Self::Own(weights) => {
                let dtype = lower.dtype_of_product_gradient(weights, dtype);
                let (dw, accumulate) = lower.gradient_of_weights(weights, dtype);
                product(lower, sizes, factors, dw, accumulate);
                lower.gradient_done(weights);
            }
            Self::Other([weight, _]) => {
                let dtype = lower.program.graph.value(weight.value).dtype;
                let dw = lower.temporary("dweight", &sizes[..2], dtype);
                product(lower, sizes, factors, dw.clone(), Accumulate::Never);
                lower.contribute(weight, dw);
            }
        }
    }
}

/// Whether a node's input is a weight of the model, all of it: one whose copies last from run to run, and whose
/// gradient is a parameter's.
pub(super) fn is_own(program: &Program<'_>, job: &Job<'_>, node: &Node, input: usize) -> bool {
    let graph = program.graph;
    let weight = &node.inputs[input];
    let [x, dtype] = [0, input].map(|input| graph.value(node.inputs[input].value).dtype);
    let is_input = matches!(graph.value(weight.value).source, graph::Source::Input(_));
    let is_parameter = job.trains && job.function.numbers.contains_key(&weight.value);
    program.is_leaf(weight)
        && (x == dtype || !is_input)
        && (is_parameter || !program.is_wanted(weight.value))
}

/// Whether the weights of some maps can be one: read by these maps alone, all of them trained or none.
/// Given by the nodes that read them, and as which input.
pub(super) fn can_be_packed(
    program: &Program<'_>,
    job: &Job<'_>,
    maps: &[(&Node, usize)],
    dtype: DType,
) -> bool {
    let weights = maps.iter().map(|(node, input)| node.inputs[*input].value);
    let weights: Vec<ValueId> = weights.collect();
    let is_trained = |weight: &ValueId| program.is_wanted(*weight);
    let reads = |weight: &ValueId| {
        let readers = program.readers(*weight).iter();
        readers
            .filter(|i| program.nodes[**i].op != "weight_cast")
            .count()
    };
    let graph = program.graph;
    let widths = |weight: &ValueId| graph.value(*weight).shape[1];
    let mut others = weights[1..].iter();
    let mut own = maps
        .iter()
        .map(|(node, input)| is_own(program, job, node, *input));
    job.function.target == Target::Cuda
        && own.all(|is_own| is_own)
        && dtype != DType::F32
        && weights
            .iter()
            .all(|weight| reads(weight) == 1 && graph.value(*weight).dtype == DType::F32)
        && others
            .all(|w| is_trained(w) == is_trained(&weights[0]) && widths(w) == widths(&weights[0]))
        && (0..weights.len()).all(|i| !weights[..i].contains(&weights[i]))
}

impl Maps {
    /// The maps of one input; packed, they are one product. `of` are their nodes.
    pub fn new(program: &Program<'_>, job: &Job<'_>, of: &[(&Node, Map)], packed: bool) -> Self {
        let graph = program.graph;
        let (node, _) = &of[0];
        let x = node.inputs[0].clone();
        let dims = graph.shape_of(&x);
        let width = dims[dims.len() - 1];
        let group = |maps: &[(&Node, Map)]| {
            let columns = |(node, map): &(&Node, Map)| graph.shape_of(&node.inputs[map.input])[0];
            let weights = match maps {
                [(node, map)] => Weights::of(program, job, node, map.input),
                _ => {
                    let all = maps.iter().map(|(node, map)| node.inputs[map.input].value);
                    Weights::Own(all.collect())
                }
            };
            Group {
                path: joined(maps.iter().map(|(_, map)| map.path.as_str())),
                columns: maps.iter().map(columns).sum(),
                is_trained: maps
                    .iter()
                    .any(|(node, map)| program.passes_through(node, map.input)),
                outputs: maps.iter().map(|(_, map)| map.output).collect(),
                bias: maps.iter().find_map(|(node, map)| {
                    let bias = map.bias?;
                    Some((
                        node.inputs[bias].clone(),
                        program.passes_through(node, bias),
                    ))
                }),
                weights,
            }
        };
        Self {
            path: joined(of.iter().map(|(_, map)| map.path.as_str())),
            x_is_wanted: of.iter().any(|(node, _)| program.passes_through(node, 0)),
            groups: of
                .chunks(if packed { of.len() } else { 1 })
                .map(group)
                .collect(),
            dtype: graph.value(x.value).dtype,
            rows: dims[..dims.len() - 1].iter().product(),
            width,
            x,
        }
    }

    /// Writes the products that read `x`.
    pub fn products(&self, lower: &mut Lower<'_>, x: &BufferRange) {
        for group in &self.groups {
            lower.plan.path.clone_from(&group.path);
            let weight = group.weights.read(lower, self.dtype);
            let shape = [self.rows, group.columns];
            let y = lower.make(group.outputs[0], "y", &shape);
            for output in &group.outputs[1..] {
                lower.places[output.0] = Some(y.clone());
            }
            let mut accumulate = Accumulate::Never;
            if let Some((bias, _)) = &group.bias {
                let bias = lower.read(bias);
                let kernel = bias::bias();
                let writes = [("y", y.clone())];
                lower.plan.call(kernel, [("bias", bias)], writes);
                accumulate = Accumulate::Always;
            }
            if self.width > 0 || group.bias.is_none() {
                let sizes = [self.rows, group.columns, self.width];
                let factors = [(x, false), (&weight, true)];
                product(lower, sizes, factors, y, accumulate);
            }
        }
    }

    /// `dx = dy W`, the sum over all maps that have a gradient; then, or once x is there again, `dW = dy^T x`.
    fn gradients(&self, lower: &mut Lower<'_>) {
        let groups: Vec<(Group, BufferRange)> = self
            .groups
            .iter()
            .filter_map(|group| {
                let dy = lower.gradients.take(group.outputs[0])?;
                for output in &group.outputs[1..] {
                    lower.gradients.take(*output);
                }
                Some((group.clone(), dy))
            })
            .collect();
        if self.x_is_wanted {
            self.input_gradient(lower, &groups);
        }
        for (group, dy) in groups {
            if let Some((bias, true)) = &group.bias {
                bias_gradient(lower, bias, &dy, [self.rows, group.columns]);
            }
            if !group.is_trained {
                continue;
            }
            let (x, sizes, first) = (
                self.x.clone(),
                [group.columns, self.width, self.rows],
                dy.clone(),
            );
            let dtype = self.dtype;
            let write = move |lower: &mut Lower<'_>| {
                lower.plan.path.clone_from(&group.path);
                let x = lower.read(&x);
                let factors = [(&dy, true), (&x, false)];
                group.weights.add_gradient(lower, dtype, sizes, factors);
            };
            match lower.is_remade(self.x.value) {
                false => write(lower),
                true => lower.wait(Waiting {
                    x: self.x.value,
                    dy: first,
                    part: lower.plan.part,
                    write: Box::new(write),
                }),
            }
        }
    }

    fn input_gradient(&self, lower: &mut Lower<'_>, groups: &[(Group, BufferRange)]) {
        // In place where a gradient is there already, and all of x is read.
        let whole = self.x.view.is_none().then_some(self.x.value);
        let mut before = whole.and_then(|x| lower.take_own(x));
        // As where `y = x + W x`: dy is read again, for the weight's gradient.
        let reads = |buffer| groups.iter().any(|(_, dy)| dy.buffer == buffer);
        if let Some(shared) = before.take_if(|before| reads(before.buffer)) {
            lower.gradients.set(self.x.value, shared);
        }
        let mut accumulate = match before {
            Some(_) => Accumulate::Always,
            None => Accumulate::Never,
        };
        lower.plan.path.clone_from(&self.path);
        let dx =
            before.unwrap_or_else(|| lower.temporary("dx", &[self.rows, self.width], self.dtype));
        for (group, dy) in groups {
            lower.plan.path.clone_from(&group.path);
            let weight = group.weights.read(lower, self.dtype);
            let sizes = [self.rows, self.width, group.columns];
            product(
                lower,
                sizes,
                [(dy, false), (&weight, false)],
                dx.clone(),
                accumulate,
            );
            accumulate = Accumulate::Always;
        }
        lower.contribute(&self.x, dx);
    }
}

impl Form for Maps {
    fn path(&self) -> &str {
        &self.path
    }

    fn outputs(&self) -> Vec<ValueId> {
        self.groups
            .iter()
            .flat_map(|group| group.outputs.clone())
            .collect()
    }

    fn inputs(&self) -> Vec<ValueId> {
        vec![self.x.value]
    }

    fn copy_weights(&self, lower: &mut Lower<'_>) {
        for group in &self.groups {
            if let Weights::Own(weights) = &group.weights {
                lower.plan.path.clone_from(&group.path);
                lower.product_weight(weights, self.dtype);
            }
        }
    }

    fn forward(&self, lower: &mut Lower<'_>) -> Result<()> {
        let x = lower.read(&self.x);
        self.products(lower, &x);
        Ok(())
    }

    fn backward(&self, lower: &mut Lower<'_>) -> Result<()> {
        self.gradients(lower);
        Ok(())
    }
}

/// `c = a b`, each factor as it lies or transposed; rows and columns of c, and what is summed over.
pub(super) fn product(
    lower: &mut Lower<'_>,
    [rows, cols, depth]: [usize; 3],
    [(a, a_transposed), (b, b_transposed)]: [(&BufferRange, bool); 2],
    c: BufferRange,
    accumulate: Accumulate,
) {
    let factor = |rows, cols, transposed| match transposed {
        false => Factor::new(rows, cols),
        true => Factor::new(cols, rows).t(),
    };
    let (of_a, of_b) = (
        factor(rows, depth, a_transposed),
        factor(depth, cols, b_transposed),
    );
    let kernel = product::product(of_a, of_b, accumulate);
    let factors = [("a", a.clone()), ("b", b.clone())];
    lower.plan.call(kernel, factors, [("c", c)]);
}

/// `db`, the sum of the rows of dy (N, F).
fn bias_gradient(
    lower: &mut Lower<'_>,
    bias: &graph::ValueRef,
    dy: &BufferRange,
    [rows, columns]: [usize; 2],
) {
    let dtype = lower.program.graph.value(bias.value).dtype;
    let wide = match lower.plan.buffers[dy.buffer].dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    };
    let sum = lower.temporary("dbias", &[columns], wide);
    let partial = lower.is_on_gpu().then(|| {
        let elements = workspace::bias_backward(rows, columns);
        lower.scratch(&[elements], DType::F32)
    });
    let writes = Named::from([("dbias", sum.clone())]).with_some("partials", partial);
    let kernel = bias::bias_gradient();
    lower.plan.call(kernel, [("dy", dy.clone())], writes);
    let gradient = match dtype == wide {
        true => sum,
        false => {
            let rounded = lower.temporary("dbias", &[columns], dtype);
            let kernel = converted();
            let writes = [("y", rounded.clone())];
            lower.plan.call(kernel, [("x", sum)], writes);
            rounded
        }
    };
    lower.contribute(bias, gradient);
}

/// `attn/q_proj+k_proj` of `attn/q_proj` and `attn/k_proj`.
fn joined<'p>(mut paths: impl Iterator<Item = &'p str>) -> String {
    let mut all = paths.next().unwrap_or_default().to_string();
    for path in paths {
        let name = path.rsplit('/').next().unwrap_or(path);
        all.push('+');
        all.push_str(name);
    }
    all
}

/// A map with a bias.
const BIASED: &str = "linear_bias";

fn parent_of(path: &str) -> String {
    path.rsplit_once('/')
        .map_or("", |(parent, _)| parent)
        .into()
}

/// The maps that are nodes of their own, those of one input together.
pub(super) fn find(program: &Program<'_>, job: &Job<'_>, packed: &[Vec<usize>], forms: &mut Forms) {
    let nodes = &program.nodes;
    let as_map = |i: usize| Map {
        path: place_of(&nodes[i]),
        input: 1,
        bias: (nodes[i].op == BIASED).then_some(2),
        output: nodes[i].output,
    };
    for i in 0..nodes.len() {
        let is_linear = |i: usize| ["linear", BIASED].contains(&nodes[i].op) && !nodes[i].composed;
        // What it reads but x is there before any node.
        let reads_weights = |node: &Node| {
            is_own(program, job, node, 1) && node.inputs[2..].iter().all(|x| program.is_leaf(x))
        };
        if !forms.is_free(i) || !is_linear(i) {
            continue;
        }
        let together = packed.iter().find(|group| group.contains(&i));
        let x = &nodes[i].inputs[0];
        let joins = |other: &usize| {
            let node = &nodes[*other];
            let is_packed = packed.iter().any(|group| group.contains(other));
            let is_alike = forms.is_free(*other) && is_linear(*other) && !is_packed;
            let same_x = || node.inputs[0].view == x.view && node.inputs[0].value == x.value;
            let flows_alike =
                || program.passes_through(node, 0) == program.passes_through(&nodes[i], 0);
            let near = || parent_of(&place_of(node)) == parent_of(&place_of(&nodes[i]));
            let is_same = || *other == i || reads_weights(node) && reads_weights(&nodes[i]);
            is_alike
                && is_same()
                && same_x()
                && flows_alike()
                && near()
                && program.are_in_one_segment(i, *other)
        };
        let readers = program.readers(x.value).iter().copied();
        let group: Vec<usize> = match together {
            Some(group) => group.clone(),
            None => readers.filter(joins).collect(),
        };
        let maps: Vec<(&Node, Map)> = group.iter().map(|i| (&nodes[*i], as_map(*i))).collect();
        let maps = Maps::new(program, job, &maps, together.is_some());
        forms.add(i, group, maps);
    }
}
