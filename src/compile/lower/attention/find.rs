//! Which nodes are attention in the model's dimension.

use super::super::form::Forms;
use super::super::program::Program;
use super::super::{Job, Target, attribute, linear, place_of};
use super::Attention;
use crate::attention::Mask;
use crate::attention::in_model::InModel;
use crate::graph::{self, Attribute, Node, ValueId};
use crate::ops::rope::HALVES;
use crate::ops::strided;
use candle_core::DType;

/// The nodes that are attention in the model's dimension; returns the linear maps that are to be one product.
pub(in crate::compile::lower) fn find(
    program: &Program<'_>,
    job: &Job<'_>,
    forms: &mut Forms,
) -> Vec<Vec<usize>> {
    let mut packed = Vec::new();
    for i in 0..program.nodes.len() {
        let Some((mut form, nodes)) = around(program, job, i) else {
            continue;
        };
        if form.sizes.packed {
            forms.add(nodes[nodes.len() - 1], nodes, form);
            continue;
        }
        let makers = form.qkv.map(|value| program.maker(value));
        if let [Some(q), Some(k), Some(v)] = makers {
            let maps = [q, k, v].map(|map| &program.nodes[map]);
            let x = &maps[0].inputs[0];
            let are_maps = maps.iter().all(|map| {
                let same_x = map.inputs[0] == *x;
                map.op == "linear" && same_x && !map.composed
            });
            let weights = maps.map(|map| (map, 1));
            let equal = maps.iter().all(|map| {
                program.graph.value(map.output).shape == program.graph.value(maps[0].output).shape
            });
            if are_maps && equal && linear::can_be_packed(program, job, &weights, form.dtype) {
                form.sizes.packed = true;
                packed.push(vec![q, k, v]);
            }
        }
        let at = nodes[nodes.len() - 1];
        forms.add(at, nodes, form);
    }
    packed
}

/// The attention node `i`, with what cuts its operands into heads, rotates them and merges its output: a form of those
/// nodes, the last one last.
fn around(program: &Program<'_>, job: &Job<'_>, i: usize) -> Option<(Attention, Vec<usize>)> {
    let (graph, node) = (program.graph, &program.nodes[i]);
    let is_naive = match node.op {
        "attention::naive" => true,
        "attention::flash" => false,
        _ => return None,
    };
    if node.composed || attribute(node, "mask")? != Attribute::Mask(Mask::Causal) {
        return None;
    }
    let heads = |place: usize| Heads::of(program, &node.inputs[place], i);
    let [q, k, v] = [heads(0)?, heads(1)?, heads(2)?];
    let merge = program.only_reader(node.output)?;
    let merged = &program.nodes[merge];
    let is_merged = merged.op == "merge_heads" && merged.inputs[0].view.is_none();
    let [batch, heads, length, head_dim] = q.shape[..] else {
        return None;
    };
    let alike = k.shape == q.shape && v.shape == q.shape && !q.shape.contains(&0);
    let rotated_alike = k.angles == q.angles && v.angles.is_none();
    let thirds = [&q, &k, &v].map(|x| x.third);
    // Thirds of the rows of one projection, which the CPU's kernels do not take.
    let in_one = thirds == [Some(0), Some(1), Some(2)]
        && q.projection == k.projection
        && k.projection == v.projection
        && job.function.target == Target::Cuda;
    let dtype = graph.value(node.output).dtype;
    let known = matches!(dtype, DType::F32 | DType::BF16 | DType::F16);
    // The CPU's naive kernel rotates by itself.
    let takes = q.angles.is_some() || !is_naive || job.function.target == Target::Cuda;
    let nodes = [&[i], &q.nodes[..], &k.nodes, &v.nodes, &[merge]].concat();
    // Rotated in place: nothing else reads a projection, nor does what makes it.
    let is_ours = [&q, &k, &v].iter().all(|x| {
        let maker = program.maker(x.projection).map(|by| program.nodes[by].op);
        let readers = program.readers(x.projection).iter();
        let made = maker.is_some_and(|op| ["linear", "linear_bias"].contains(&op));
        made && !program.is_output(x.projection)
            && readers.clone().all(|reader| nodes.contains(reader))
            && (in_one || readers.count() == 1)
    });
    let together = nodes
        .iter()
        .all(|other| program.are_in_one_segment(i, *other));
    let fits = is_merged && alike && rotated_alike && known && takes && is_ours && together;
    if !fits || !(in_one || thirds == [None; 3]) {
        return None;
    }
    let Attribute::Number(scale) = attribute(node, "scale")? else {
        return None;
    };
    let angles = q.angles.clone();
    let form = Attention {
        path: place_of(node),
        sizes: InModel {
            batch,
            length,
            heads,
            head_dim,
            scale,
            packed: in_one,
        },
        dtype,
        is_naive,
        qkv: [q, k, v].map(|x| x.projection),
        angles,
        kept: node.kept.iter().map(|kept| kept.value).collect(),
        output: merged.output,
        is_wanted: program.is_wanted(node.output),
    };
    Some((form, nodes))
}

/// q, k or v, from a projection to the heads that attention reads.
struct Heads {
    /// (N, D), or (N, 3 D).
    projection: ValueId,
    /// Which third of its columns they are, if not all.
    third: Option<usize>,
    /// (B, H, T, Dh).
    shape: Vec<usize>,
    /// Cosines and sines, where they are rotated.
    angles: Option<[graph::ValueRef; 2]>,
    /// What cuts and rotates them.
    nodes: Vec<usize>,
}

impl Heads {
    /// What node `reader` reads as `operand`.
    fn of(program: &Program<'_>, operand: &graph::ValueRef, reader: usize) -> Option<Self> {
        let mut maker = cut(program, operand, reader)?;
        let (mut angles, mut nodes) = (None, Vec::new());
        if program.nodes[maker].op == "rope" {
            let rope = &program.nodes[maker];
            if attribute(rope, HALVES).is_some() {
                return None; // the kernels rotate adjacent pairs
            }
            let [cos, sin] = &rope.reads[..] else {
                return None;
            };
            angles = Some([constant(program, cos)?, constant(program, sin)?]);
            nodes.push(maker);
            maker = cut(program, &rope.inputs[0], maker)?;
        }
        let split = &program.nodes[maker];
        if split.op != "split_heads" {
            return None;
        }
        nodes.push(maker);
        let mut projection = &split.inputs[0];
        let copy =
            cut(program, projection, maker).filter(|by| program.nodes[*by].op == "contiguous");
        if let Some(copy) = copy {
            nodes.push(copy);
            projection = &program.nodes[copy].inputs[0];
        }
        let third = match &projection.view {
            None => None,
            Some(view) => Some(third(
                view,
                program.graph.value(projection.value).elements(),
            )?),
        };
        Some(Self {
            projection: projection.value,
            third,
            shape: program.graph.value(split.output).shape.clone(),
            angles,
            nodes,
        })
    }
}

/// Which third a view (B, T, D) is of the columns of a (B, T, 3 D) of so many elements.
fn third(view: &graph::View, elements: usize) -> Option<usize> {
    let [batch, length, width] = view.shape[..] else {
        return None;
    };
    let is_third = view.stride == [3 * length * width, 3 * width, 1] && width > 0;
    let is_all = 3 * batch * length * width == elements;
    let fits = is_third && is_all && view.offset.is_multiple_of(width);
    fits.then(|| view.offset / width)
}

/// The node that makes all of an operand, which node `reader` alone reads.
fn cut(program: &Program<'_>, operand: &graph::ValueRef, reader: usize) -> Option<usize> {
    let is_whole = operand.view.is_none() && program.only_reader(operand.value) == Some(reader);
    is_whole.then(|| program.maker(operand.value)).flatten()
}

/// The constant that a table is, behind its casts.
fn constant(program: &Program<'_>, operand: &graph::ValueRef) -> Option<graph::ValueRef> {
    let Some(maker) = program.maker(operand.value) else {
        let source = &program.graph.value(operand.value).source;
        let is_dense = operand.view.as_ref().is_none_or(strided::is_contiguous);
        return (is_dense && *source == graph::Source::Constant).then(|| operand.clone());
    };
    let node: &Node = &program.nodes[maker];
    let is_cast = ["cast", "to_dtype"].contains(&node.op) && operand.view.is_none();
    is_cast
        .then(|| constant(program, &node.inputs[0]))
        .flatten()
}
