//! A graph as a picture for Graphviz, and as a table.

use super::{in_precision, meta, meta_ids};
use candle_core::DType;
use rstest::rstest;
use std::collections::HashSet;
use tallow::attention::Algorithm;
use tallow::graph::{self, Graph, Source, Target};
use tallow::nn::Checkpointing;
use tallow::ops::{KernelPolicy, with_kernel_policy};
use tallow::probe::module;
use tallow::{ops, profile};

fn of_model(attention: Algorithm, half: Option<DType>, checkpointing: Checkpointing) -> Graph {
    let model = meta(attention).with_checkpointing(checkpointing);
    let [x, y] = meta_ids(3, 5);
    graph::trace(Target::Cpu, || in_precision(half, || model.loss(&x, &y))).unwrap()
}

#[test]
fn a_small_graph_in_full() {
    let weights = graph::weights(DType::F32);
    let w = weights.get((3, 4), r#"a "quoted" \ name"#).unwrap();
    let x = graph::input("x", (2, 4), DType::F32).unwrap();
    let unread = graph::input("unread", 1, DType::U32).unwrap();
    let forward = || {
        let y = {
            let _outer = module(|| "outer");
            let _inner = module(|| "in\"ner");
            let y = ops::linear(&x, &w)?;
            with_kernel_policy(KernelPolicy::Reference, || ops::add(&y, &y))?
        };
        Ok((ops::cast(&y, DType::BF16)?, unread.clone()))
    };
    let graph = graph::trace(Target::Cpu, forward).unwrap();
    let wanted = r#"digraph {
  v0 [label="x\n[2, 4] f32", shape=box];
  v4 [label="cast\n[2, 3] bf16", peripheries=2];
  v5 [label="unread\n[1] u32", shape=box, peripheries=2];
  subgraph cluster_0 {
    label="outer";
    subgraph cluster_1 {
      label="in\"ner";
      v1 [label="a \"quoted\" \\ name\n[3, 4] f32", shape=box];
      v2 [label="linear\n[2, 3] f32"];
      v3 [label="add\n[2, 3] f32", style=dashed];
    }
  }
  v0 -> v2;
  v1 -> v2;
  v2 -> v3;
  v2 -> v3;
  v3 -> v4 [label="f32"];
}
"#;
    assert_eq!(graph.to_dot(), wanted);
}

/// Returns the text without its quoted parts.
fn unquoted(text: &str) -> String {
    text.split('"').step_by(2).collect()
}

#[rstest]
fn all_of_a_model_is_drawn_once(
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
    #[values(None, Some(DType::BF16))] half: Option<DType>,
    #[values(Checkpointing::None, Checkpointing::Sqrt)] checkpointing: Checkpointing,
) {
    let graph = of_model(attention, half, checkpointing);
    let text = graph.to_dot();
    assert_eq!(text, of_model(attention, half, checkpointing).to_dot());
    let bare = unquoted(&text);
    assert_eq!(bare.matches('{').count(), bare.matches('}').count());

    let lines = || {
        text.lines()
            .map(str::trim)
            .filter(|line| line.starts_with('v'))
    };
    let [arrows, drawn] = [true, false].map(|is_arrow| {
        let lines = lines().filter(|line| line.contains(" -> ") == is_arrow);
        lines.collect::<Vec<_>>()
    });
    let ids: HashSet<&str> = drawn
        .iter()
        .filter_map(|line| line.split(' ').next())
        .collect();
    assert_eq!(ids.len(), drawn.len());
    let outside = graph
        .values()
        .iter()
        .filter(|value| value.source != Source::Node);
    assert_eq!(drawn.len(), graph.nodes().count() + outside.count());
    let operands = graph
        .nodes()
        .map(|node| node.inputs.len() + node.extra_inputs.len());
    assert_eq!(arrows.len(), operands.sum::<usize>());
    for arrow in arrows {
        let ends: Vec<&str> = arrow.split([' ', ';']).step_by(2).take(2).collect();
        assert!(ends.iter().all(|id| ids.contains(id)), "{arrow}");
    }
}

#[test]
fn the_table_has_every_node_with_its_cost() {
    let graph = of_model(Algorithm::Flash, Some(DType::BF16), Checkpointing::None);
    let table = profile::node_table(&graph);
    let costs = profile::node_costs(&graph);
    assert_eq!(table.rows.len(), costs.len());
    for (row, cost) in table.rows.iter().zip(&costs) {
        let number = |key: &str| row.get(key).unwrap().as_f64();
        assert_eq!(row.get("path").unwrap(), cost.node.path.as_str());
        assert_eq!(
            number("forward_flops"),
            cost.forward.map(|cost| cost.flops())
        );
        assert_eq!(
            number("backward_bytes"),
            cost.backward.map(|cost| cost.bytes())
        );
        let shape = &graph.get(cost.node.output).unwrap().shape;
        assert_eq!(row.get("output").unwrap(), &format!("{shape:?}"));
    }
    let flash = table
        .rows
        .iter()
        .find(|row| row.get("op").unwrap() == "attention::flash");
    // lse in f32, (1, B, H, T), and the rounding error of the output in bf16, (B, H, T, Dh).
    let kept_bytes = 3 * 2 * 5 * (4 + 2 * 8);
    assert_eq!(
        flash.unwrap().get("kept_bytes").unwrap(),
        f64::from(kept_bytes)
    );
}
