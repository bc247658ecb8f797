//! Linear maps of one input: `y = x W^T`, or `x W^T + b`. On a GPU in half precision they may be one product, whose
//! weights' copies lie one under the other and whose outputs lie beside each other.

use super::super::plan::Operand;
use super::form::{Form, Forms};
use super::gradients::Waiting;
use super::program::Program;
use super::{Job, Lower, Target, place_of};
use crate::Result;
use crate::graph::{self, Node, ValueId};
use crate::kernels::workspace;
use crate::ops::lowering::{Accumulate, Named};
use crate::ops::product::{self, Factor};
use crate::ops::{converted, linear_bias};
use candle_core::DType;

/// The linear maps of one input.
#[derive(Clone)]
pub(super) struct Maps {
    path: String,
    /// (N, D).
    pub x: graph::Operand,
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
    weights: Vec<ValueId>,
    /// (N, F) each, or one (N, n F), of which every output is a part.
    outputs: Vec<ValueId>,
    /// F of all.
    columns: usize,
    is_trained: bool,
    /// (F), of one map alone, and whether its gradient is needed.
    bias: Option<(graph::Operand, bool)>,
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

/// Whether a node's product of x with input number `input`, a weight, can be a call: of elements that a GPU, too,
/// multiplies.
pub(super) fn is_map(program: &Program<'_>, node: &Node, input: usize) -> bool {
    let graph = program.graph;
    let (x, weight) = (&node.inputs[0], &node.inputs[input]);
    let [x_dtype, dtype] = [x, weight].map(|operand| graph.value(operand.value).dtype);
    let is_half = matches!(x_dtype, DType::BF16 | DType::F16);
    let fits =
        x_dtype == dtype && (is_half || dtype == DType::F32) || is_half && dtype == DType::F32;
    let is_empty = [x, weight]
        .iter()
        .any(|operand| graph.shape_of(operand).contains(&0));
    // Copies in half precision last from run to run on a GPU, where an input is another each time.
    let is_input = matches!(graph.value(weight.value).source, graph::Source::Input(_));
    let is_copied = x_dtype != dtype;
    if is_empty || node.composed || is_input && is_copied {
        return false;
    }
    fits && program.is_leaf(weight) && graph.shape_of(weight).len() == 2
}

/// Whether the weights of some maps can be one: read by these maps alone, all of them trained or none.
pub(super) fn can_be_packed(
    program: &Program<'_>,
    job: &Job<'_>,
    weights: &[ValueId],
    dtype: DType,
) -> bool {
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
    job.function.target == Target::Cuda
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
    pub fn new(program: &Program<'_>, of: &[(&Node, Map)], packed: bool) -> Self {
        let graph = program.graph;
        let (node, _) = &of[0];
        let x = node.inputs[0].clone();
        let dims = graph.shape_of(&x);
        let width = dims[dims.len() - 1];
        let group = |maps: &[(&Node, Map)]| {
            let weights: Vec<ValueId> = maps
                .iter()
                .map(|(node, map)| node.inputs[map.input].value)
                .collect();
            Group {
                path: joined(maps.iter().map(|(_, map)| map.path.as_str())),
                columns: weights.iter().map(|w| graph.value(*w).shape[0]).sum(),
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
            rows: dims.iter().product::<usize>() / width,
            width,
            x,
        }
    }

    /// Writes the products that read `x`.
    pub fn products(&self, lower: &mut Lower<'_>, x: &Operand) {
        for group in &self.groups {
            lower.plan.path.clone_from(&group.path);
            let weight = lower.product_weight(&group.weights, self.dtype);
            let shape = [self.rows, group.columns];
            let y = lower.make(group.outputs[0], "y", &shape);
            for output in &group.outputs[1..] {
                lower.places[output.0] = Some(y.clone());
            }
            let mut accumulate = Accumulate::Never;
            if let Some((bias, _)) = &group.bias {
                let bias = lower.read(bias);
                let kernel = linear_bias::bias();
                let writes = [("y", y.clone())];
                lower.plan.call(kernel, [("bias", bias)], writes);
                accumulate = Accumulate::Always;
            }
            let sizes = [self.rows, group.columns, self.width];
            let factors = [(x, false), (&weight, true)];
            product(lower, sizes, factors, y, accumulate);
        }
    }

    /// `dx = dy W`, the sum over all maps that have a gradient; then, or once x is there again, `dW = dy^T x`.
    fn gradients(&self, lower: &mut Lower<'_>) {
        let groups: Vec<(Group, Operand)> = self
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
                let dtype = lower.dtype_of_product_gradient(&group.weights, dtype);
                let (dw, accumulate) = lower.gradient_of_weights(&group.weights, dtype);
                product(lower, sizes, [(&dy, true), (&x, false)], dw, accumulate);
                lower.gradient_done(&group.weights);
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

    fn input_gradient(&self, lower: &mut Lower<'_>, groups: &[(Group, Operand)]) {
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
            let weight = lower.product_weight(&group.weights, self.dtype);
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
            lower.plan.path.clone_from(&group.path);
            lower.product_weight(&group.weights, self.dtype);
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
    [(a, a_transposed), (b, b_transposed)]: [(&Operand, bool); 2],
    c: Operand,
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
    bias: &graph::Operand,
    dy: &Operand,
    [rows, columns]: [usize; 2],
) {
    let sum = lower.temporary("dbias", &[columns], DType::F32);
    let partial = lower.is_on_gpu().then(|| {
        let elements = workspace::bias_backward(rows, columns);
        lower.scratch(&[elements], DType::F32)
    });
    let writes = Named::from([("dbias", sum.clone())]).with_some("partials", partial);
    let kernel = linear_bias::bias_gradient();
    lower.plan.call(kernel, [("dy", dy.clone())], writes);
    let dtype = lower.program.graph.value(bias.value).dtype;
    let gradient = match dtype {
        DType::F32 => sum,
        _ => {
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

/// A map with a bias that its kernel takes.
const BIASED: &str = "linear_bias";

fn has_bias(program: &Program<'_>, node: &Node) -> bool {
    let [x, bias] = [0, 2].map(|input| program.graph.value(node.inputs[input].value).dtype);
    bias == x || bias == DType::F32
}

fn parent_of(path: &str) -> String {
    path.rsplit_once('/')
        .map_or("", |(parent, _)| parent)
        .into()
}

/// The maps that are nodes of their own, those of one input together.
pub(super) fn find(program: &Program<'_>, packed: &[Vec<usize>], forms: &mut Forms) {
    let nodes = &program.nodes;
    let as_map = |i: usize| Map {
        path: place_of(&nodes[i]),
        input: 1,
        bias: (nodes[i].op == BIASED).then_some(2),
        output: nodes[i].output,
    };
    for i in 0..nodes.len() {
        let is_linear = |i: usize| match nodes[i].op {
            "linear" => is_map(program, &nodes[i], 1),
            BIASED => is_map(program, &nodes[i], 1) && has_bias(program, &nodes[i]),
            _ => false,
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
            is_alike && same_x() && flows_alike() && near() && program.are_in_one_segment(i, *other)
        };
        let readers = program.readers(x.value).iter().copied();
        let group: Vec<usize> = match together {
            Some(group) => group.clone(),
            None => readers.filter(joins).collect(),
        };
        let maps: Vec<(&Node, Map)> = group.iter().map(|i| (&nodes[*i], as_map(*i))).collect();
        let maps = Maps::new(program, &maps, together.is_some());
        forms.add(i, group, maps);
    }
}
