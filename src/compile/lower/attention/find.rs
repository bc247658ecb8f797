//! Which nodes are attention in the model's dimension.

use super::super::form::Forms;
use super::super::program::Program;
use super::super::{Job, Target, attribute, linear, place_of};
use super::Attention;
use crate::attention::Mask;
use crate::attention::in_model::InModel;
use crate::attention::lowering::reads as read_beside;
use crate::graph::{self, Attribute, Node, ValueId};
use crate::ops::dropout::of_attributes;
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
    if job.function.target != Target::Cuda {
        return packed;
    }
    for i in 0..program.nodes.len() {
        let Some((mut form, nodes)) = around(program, i) else {
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
            if are_maps && linear::can_be_packed(program, job, &weights, form.dtype) {
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
fn around(program: &Program<'_>, i: usize) -> Option<(Attention, Vec<usize>)> {
    let (graph, node) = (program.graph, &program.nodes[i]);
    let is_naive = match node.op {
        "attention::naive" => true,
        "attention::flash" => false,
        _ => return None,
    };
    let (Attribute::Mask(mask), Attribute::Number(scale)) =
        (attribute(node, "mask")?, attribute(node, "scale")?)
    else {
        return None;
    };
    if node.composed || !matches!(mask, Mask::Causal | Mask::Window(_)) {
        return None;
    }
    let dropout = of_attributes(&node.attributes);
    let heads = |place: usize| Heads::of(program, &node.inputs[place], i);
    let [q, k, v] = [heads(0)?, heads(1)?, heads(2)?];
    let merge = program.only_reader(node.output)?;
    let merged = &program.nodes[merge];
    let is_merged = merged.op == "merge_heads" && merged.inputs[0].view.is_none();
    let [batch, heads, length, head_dim] = q.shape[..] else {
        return None;
    };
    let kv_heads = *k.shape.get(1)?;
    let of_kv = [batch, kv_heads, length, head_dim];
    let alike = k.shape == of_kv && v.shape == of_kv && !q.shape.contains(&0) && kv_heads > 0;
    let grouped = kv_heads != heads;
    let rotated_alike = k.angles == q.angles && v.angles.is_none() && q.by_halves == k.by_halves;
    let angles = q.angles.clone();
    let sizes = InModel {
        batch,
        length,
        heads,
        kv_heads,
        head_dim,
        mask,
        scale,
        dropout,
        by_halves: q.by_halves,
        packed: false,
    };
    // Parts of the rows of one projection.
    let columns = sizes.columns();
    let row = columns.iter().sum();
    let firsts = [0, columns[0], columns[0] + columns[1]];
    let parts = [&q, &k, &v].map(|x| x.part);
    let in_one = parts == firsts.map(|first| Some(Part { first, row }))
        && q.projection == k.projection
        && k.projection == v.projection;
    let dtype = graph.value(node.output).dtype;
    let known = matches!(dtype, DType::F32 | DType::BF16 | DType::F16);
    let takes = !is_naive || !grouped; // naive attention's kernels know no groups
    let nodes = [&[i], &q.nodes[..], &k.nodes, &v.nodes, &[merge]].concat();
    // Rotated in place: nothing else reads a projection, nor does what makes it.
    let is_ours = [&q, &k, &v].iter().all(|x| {
        let maker = program.maker(x.projection).map(|by| program.nodes[by].op);
        let readers = program.readers(x.projection).iter();
        let makers = ["linear", "linear_bias", "rms_norm"];
        let made = maker.is_some_and(|op| makers.contains(&op));
        made && !program.is_output(x.projection)
            && readers.clone().all(|reader| nodes.contains(reader))
            && (in_one || readers.count() == 1)
    });
    let together = nodes
        .iter()
        .all(|other| program.are_in_one_segment(i, *other));
    let fits = is_merged && alike && rotated_alike && known && takes && is_ours && together;
    if !fits || !(in_one || parts == [None; 3]) {
        return None;
    }
    let form = Attention {
        path: place_of(node),
        sizes: InModel {
            packed: in_one,
            ..sizes
        },
        dtype,
        is_naive,
        qkv: [q, k, v].map(|x| x.projection),
        angles,
        reads: read_beside(node.reads.len(), dropout.is_some())
            .map(|read| Some(node.reads[read?].clone())),
        kept: node.kept.iter().map(|kept| kept.value).collect(),
        output: merged.output,
        is_wanted: program.is_wanted(node.output),
    };
    Some((form, nodes))
}

/// q, k or v, from a projection to the heads that attention reads.
struct Heads {
    /// (N, their columns), or more in a row.
    projection: ValueId,
    /// Which of its columns they are, if not all.
    part: Option<Part>,
    /// (B, heads, T, Dh).
    shape: Vec<usize>,
    /// Cosines and sines, where they are rotated.
    angles: Option<[graph::ValueRef; 2]>,
    by_halves: bool,
    /// What cuts and rotates them.
    nodes: Vec<usize>,
}

/// Columns of longer rows.
#[derive(Clone, Copy, PartialEq)]
struct Part {
    first: usize,
    /// How many columns there are in all.
    row: usize,
}

impl Part {
    /// All of the columns of a view.
    fn all(view: &graph::View) -> Self {
        Self {
            first: 0,
            row: view.shape[view.shape.len() - 1],
        }
    }
}

impl Heads {
    /// What node `reader` reads as `operand`.
    fn of(program: &Program<'_>, operand: &graph::ValueRef, reader: usize) -> Option<Self> {
        let mut maker = cut(program, operand, reader)?;
        let (mut angles, mut by_halves, mut nodes) = (None, false, Vec::new());
        if program.nodes[maker].op == "rope" {
            let rope = &program.nodes[maker];
            by_halves = attribute(rope, HALVES).is_some();
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
        let elements = program.graph.value(projection.value).elements();
        let part = match &projection.view {
            None => None,
            Some(view) => Some(part(view, elements)?).filter(|part| *part != Part::all(view)),
        };
        Some(Self {
            projection: projection.value,
            part,
            shape: program.graph.value(split.output).shape.clone(),
            angles,
            by_halves,
            nodes,
        })
    }
}

/// Which columns a view (B, T, width) is of a (B, T, row) of so many elements.
fn part(view: &graph::View, elements: usize) -> Option<Part> {
    let [batch, length, width] = view.shape[..] else {
        return None;
    };
    let row = view.stride[1];
    let fits = view.stride == [length * row, row, 1]
        && batch * length * row == elements
        && view.offset + width <= row;
    let first = view.offset;
    fits.then_some(Part { first, row })
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
