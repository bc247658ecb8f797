//! Fuses attention on a GPU: kernels read and write heads in the layout of the projections and rotate them in place.
//! The three projections become one matmul if their weights can be packed. On the CPU, copying heads costs nothing
//! measurable.

use super::packed::Packed;
use super::{Kind, Node, Program, Replacement};
use crate::attention::in_rows::InRows;
use crate::attention::{Mask, SOFT_CAP, flash, naive};
use crate::graph::{Attribute, Source, Target, Value, ValueId, ValueRef, View};
use crate::kernels::attention::Sizes;
use crate::ops::dropout::dropout_from_attributes;
use crate::ops::info::OpInfo;
use crate::ops::record::{CONTIGUOUS, TO_DTYPE};
use crate::ops::rope::HALVES;
use crate::ops::{cast, heads, linear, linear_bias, rms_norm, rope, strided};
use candle_core::DType;

pub(super) fn rewrite(program: &mut Program) {
    if program.target != Target::Cuda {
        return;
    }
    let mut replacements = Vec::new();
    for i in 0..program.nodes.len() {
        let Some(found) = Found::around(program, i) else {
            continue;
        };
        let packed = match found.in_rows.packed {
            true => None,
            false => as_one_matmul(program, i, found.projections),
        };
        let qkv = match &packed {
            Some((_, qkv)) => vec![*qkv],
            None if found.in_rows.packed => vec![found.projections[0]],
            None => found.projections.to_vec(),
        };
        replacements.push(found.attention(program, i, &qkv));
        replacements.extend(packed.map(|(replacement, _)| replacement));
    }
    program.replace(replacements);
}

/// Packs the linear layers that compute the inputs of an attention into one; returns it and its output.
fn as_one_matmul(
    program: &mut Program,
    attention: usize,
    projections: [ValueId; 3],
) -> Option<(Replacement, ValueId)> {
    let makers = projections.map(|value| program.maker(value));
    let nodes = [makers[0]?, makers[1]?, makers[2]?];
    let x = program.nodes[nodes[0]].inputs[0].clone();
    let are_maps = nodes
        .iter()
        .all(|map| program.is_kernel(*map, &linear::INFO) && program.nodes[*map].inputs[0] == x);
    let flows = |node: usize, input: usize| program.nodes[node].needs_grad[input];
    let flows_alike = (0..3).all(|i| {
        flows(attention, i) == flows(attention, 0) && flows(nodes[i], 0) == flows(nodes[0], 0)
    });
    if !are_maps || !flows_alike {
        return None;
    }
    let Packed {
        weight,
        copy,
        rows,
        needs_grad,
    } = program.packed(&nodes.map(|map| (map, 1)))?;
    let like = program.value(projections[0]).clone();
    let mut shape = like.shape.clone();
    shape.pop();
    shape.push(rows);
    let qkv = program.add(Value { shape, ..like }, projections[0]);
    let maps = nodes.map(|map| &program.nodes[map]);
    let by = Node {
        path: joined_paths(maps.map(|map| map.path.as_str())),
        inputs: vec![x, weight],
        extra_inputs: vec![copy],
        output: qkv,
        needs_grad: vec![maps.iter().any(|map| map.needs_grad[0]), needs_grad],
        ..maps[0].clone()
    };
    let replacement = Replacement {
        nodes: nodes.to_vec(),
        at: nodes[0],
        by: by.replacing(maps),
    };
    Some((replacement, qkv))
}

/// `attn/q_proj+k_proj` of `attn/q_proj` and `attn/k_proj`.
fn joined_paths([first, others @ ..]: [&str; 3]) -> String {
    let names = others.map(|path| path.rsplit('/').next().unwrap_or(path));
    format!("{first}+{}", names.join("+"))
}

/// An attention with the nodes that split its operands into heads, rotate them and merge its output.
struct Found {
    in_rows: InRows,
    /// The projections q, k and v.
    projections: [ValueId; 3],
    /// Cosines and sines, where they are rotated.
    angles: Option<[ValueRef; 2]>,
    /// The merged heads.
    output: ValueId,
    /// Indices of all these nodes, ascending.
    nodes: Vec<usize>,
}

impl Found {
    fn around(program: &Program, i: usize) -> Option<Self> {
        let node = &program.nodes[i];
        let is_naive = program.is_kernel(i, &naive::INFO);
        if !is_naive && !program.is_kernel(i, &flash::INFO) {
            return None;
        }
        let (Attribute::Mask(mask), Attribute::Number(scale)) =
            (node.attribute("mask")?, node.attribute("scale")?)
        else {
            return None;
        };
        let soft_cap = match node.attribute(SOFT_CAP) {
            Some(Attribute::Number(cap)) => Some(cap),
            _ => None,
        };
        if !matches!(mask, Mask::Causal | Mask::Window(_)) {
            return None;
        }
        let operand = |place: usize| Heads::of(program, &node.inputs[place], i);
        let [q, k, v] = [operand(0)?, operand(1)?, operand(2)?];
        let merge = program.only_reader(node.output)?;
        let merged = &program.nodes[merge];
        let is_merged = program.is(merge, &heads::MERGE_INFO) && merged.inputs[0].view.is_none();
        let [batch, heads, length, head_dim] = q.shape[..] else {
            return None;
        };
        let kv_heads = *k.shape.get(1)?;
        let of_kv = [batch, kv_heads, length, head_dim];
        let alike = k.shape == of_kv && v.shape == of_kv && !q.shape.contains(&0) && kv_heads > 0;
        let rotated_alike =
            k.angles == q.angles && v.angles.is_none() && q.by_halves == k.by_halves;
        // q, k and v may be column ranges of one projection.
        let columns = [heads, kv_heads, kv_heads].map(|heads| heads * head_dim);
        let row = columns.iter().sum();
        let firsts = [0, columns[0], columns[0] + columns[1]];
        let parts = [&q, &k, &v].map(|x| x.part);
        let in_one = parts == firsts.map(|first| Some(Part { first, row }))
            && q.projection == k.projection
            && k.projection == v.projection;
        let dtype = program.value(node.output).dtype;
        let known = matches!(dtype, DType::F32 | DType::BF16 | DType::F16);
        let takes = !is_naive || kv_heads == heads; // naive attention's kernels do not support grouped heads
        let mut nodes = [&[i], &q.nodes[..], &k.nodes, &v.nodes, &[merge]].concat();
        nodes.sort_unstable();
        // Projections are rotated in place, so nothing else may read them, nor may the backward of the node that
        // computes them. A recomputed segment must compute them again, or they would be rotated twice.
        let is_ours = [&q, &k, &v].iter().all(|x| {
            let readers = program.readers(x.projection).iter();
            let makers = [linear::INFO, linear_bias::INFO, rms_norm::INFO];
            let maker = program.maker(x.projection);
            let made = maker.is_some_and(|by| {
                makers.iter().any(|op| program.is(by, op)) && program.are_in_one_segment(i, by)
            });
            made && !program.is_output(x.projection)
                && readers.clone().all(|reader| nodes.contains(reader))
                && (in_one || readers.count() == 1)
        });
        let together = nodes
            .iter()
            .all(|other| program.are_in_one_segment(i, *other));
        // A packed projection has one gradient.
        let flows_alike = !in_one
            || node
                .needs_grad
                .iter()
                .all(|needs_grad| *needs_grad == node.needs_grad[0]);
        let fits = is_merged && alike && rotated_alike && known && takes && is_ours && together;
        (fits && flows_alike && (in_one || parts == [None; 3])).then_some(Self {
            in_rows: InRows {
                sizes: Sizes {
                    batch,
                    heads,
                    kv_heads,
                    queries: length,
                    keys: length,
                    head_dim,
                    value_dim: head_dim,
                    mask,
                    scale,
                    soft_cap,
                },
                dropout: dropout_from_attributes(&node.attributes),
                is_naive,
                packed: in_one,
                by_halves: q.angles.as_ref().map(|_| q.by_halves),
            },
            projections: [&q, &k, &v].map(|x| x.projection),
            angles: q.angles,
            output: merged.output,
            nodes,
        })
    }

    /// Returns the fused node. `qkv` are the projections, or their packed one; `i` is the attention's index.
    fn attention(self, program: &Program, i: usize, qkv: &[ValueId]) -> Replacement {
        let node = &program.nodes[i];
        let in_rows = InRows {
            packed: qkv.len() == 1,
            ..self.in_rows
        };
        let whole = |value: &ValueId| ValueRef {
            value: *value,
            view: None,
            tracked: true,
        };
        let needs_grad = match qkv.len() {
            1 => vec![node.needs_grad.contains(&true)],
            _ => node.needs_grad.clone(),
        };
        let angles = self.angles.into_iter().flatten();
        let by = Node {
            kind: Kind::Attention(in_rows),
            inputs: qkv.iter().map(whole).collect(),
            extra_inputs: angles.chain(node.extra_inputs.iter().cloned()).collect(),
            output: self.output,
            needs_grad,
            ..node.clone()
        };
        let all = self.nodes.iter().map(|node| &program.nodes[*node]);
        Replacement {
            at: self.nodes[self.nodes.len() - 1],
            by: by.replacing(all),
            nodes: self.nodes,
        }
    }
}

/// q, k or v: a projection and the nodes that split it into heads.
struct Heads {
    /// (B, T, columns); the columns of q, k or v, or more.
    projection: ValueId,
    /// The range of its columns, if not all.
    part: Option<Part>,
    /// (B, heads, T, Dh).
    shape: Vec<usize>,
    /// Cosines and sines, where they are rotated.
    angles: Option<[ValueRef; 2]>,
    by_halves: bool,
    /// The nodes that split and rotate them.
    nodes: Vec<usize>,
}

/// A range of columns.
#[derive(Clone, Copy, PartialEq)]
struct Part {
    first: usize,
    /// The number of columns in a row.
    row: usize,
}

impl Heads {
    /// Follows `operand` of node `reader` back to its projection.
    fn of(program: &Program, operand: &ValueRef, reader: usize) -> Option<Self> {
        let mut maker = cut(program, operand, reader)?;
        let (mut angles, mut by_halves, mut nodes) = (None, false, Vec::new());
        if program.is(maker, &rope::INFO) {
            let rope = &program.nodes[maker];
            by_halves = rope.attribute(HALVES).is_some();
            let [cos, sin] = &rope.extra_inputs[..] else {
                return None;
            };
            angles = Some([constant(program, cos)?, constant(program, sin)?]);
            nodes.push(maker);
            maker = cut(program, &rope.inputs[0], maker)?;
        }
        if !program.is(maker, &heads::SPLIT_INFO) {
            return None;
        }
        let split = &program.nodes[maker];
        nodes.push(maker);
        let mut projection = &split.inputs[0];
        let copy = cut(program, projection, maker).filter(|by| program.is(*by, &CONTIGUOUS));
        if let Some(copy) = copy {
            nodes.push(copy);
            projection = &program.nodes[copy].inputs[0];
        }
        let elements = program.value(projection.value).elements();
        let part = match &projection.view {
            None => None,
            Some(view) => Some(part(view, elements)?).filter(|part| *part != Part::all(view)),
        };
        Some(Self {
            projection: projection.value,
            part,
            shape: program.value(split.output).shape.clone(),
            angles,
            by_halves,
            nodes,
        })
    }
}

impl Part {
    /// Returns all columns of a view.
    fn all(view: &View) -> Self {
        Self {
            first: 0,
            row: view.shape[view.shape.len() - 1],
        }
    }
}

/// Returns the columns of a (B, T, row) tensor that a (B, T, width) view selects.
fn part(view: &View, elements: usize) -> Option<Part> {
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

/// Returns the node that computes an operand, if `reader` is the only reader and reads all of it.
fn cut(program: &Program, operand: &ValueRef, reader: usize) -> Option<usize> {
    let is_whole = operand.view.is_none() && program.only_reader(operand.value) == Some(reader);
    is_whole.then(|| program.maker(operand.value)).flatten()
}

/// Returns the constant that an operand is a cast of.
fn constant(program: &Program, operand: &ValueRef) -> Option<ValueRef> {
    let Some(maker) = program.maker(operand.value) else {
        let source = &program.value(operand.value).source;
        let is_dense = operand.view.as_ref().is_none_or(strided::is_contiguous);
        return (is_dense && *source == Source::Constant).then(|| operand.clone());
    };
    let casts: [&OpInfo; 2] = [&cast::CAST, &TO_DTYPE];
    let is_cast = casts.iter().any(|op| program.is(maker, op)) && operand.view.is_none();
    let inputs = &program.nodes[maker].inputs;
    is_cast.then(|| constant(program, &inputs[0])).flatten()
}
