//! Linear maps of one input: `y = x W^T`, or `x W^T + b`. On a GPU in half precision they may be one product, whose
//! weights' copies lie one under the other and whose outputs lie beside each other.

mod find;
mod weights;

pub(super) use find::find;
pub(super) use weights::{can_be_packed, is_own};

use super::super::plan::BufferRange;
use super::form::Form;
use super::gradients::Waiting;
use super::program::Program;
use super::{Job, Lower};
use crate::Result;
use crate::graph::{self, Node, ValueId};
use crate::kernels::workspace;
use crate::ops::bias;
use crate::ops::lowering::{Accumulate, Named, converted};
use crate::ops::product::{self, Factor};
use candle_core::DType;
use weights::Weights;

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
    let kernel = bias::bias_gradient(rows, columns, wide);
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
