//! Plans for a card, which need none.

use super::*;
use crate::precision::Precision;

fn card_plan(model: &TransformerConfig, config: &PlanConfig, gates: usize) -> Plan {
    let angles = vec![0.0; config.sequence_length * model.head_dim() / 2];
    let source = Source {
        model,
        config,
        angles: [&angles, &angles],
        target: Target::Card,
    };
    let again = Again {
        checkpointing: Checkpointing::None,
        gates,
    };
    train_step(source, again)
}

fn small(num_layers: usize) -> TransformerConfig {
    TransformerConfig {
        attention: Algorithm::Flash,
        num_layers,
        context_length: 1024,
        ..TransformerConfig::small()
    }
}

fn in_bf16(batch_size: usize) -> PlanConfig {
    PlanConfig {
        batch_size,
        sequence_length: 1024,
        precision: Precision::BF16,
        ..Default::default()
    }
}

/// To the byte: the residual stream before each norm and rstd, in f32; in bf16 q, k and v, attention's output with what
/// rounding took from it, gate and up; the log-sum-exp. No norm's output, and with gates run again neither gate nor up.
#[test]
fn what_a_block_leaves() {
    let config = in_bf16(2);
    let activations = |layers, gates| {
        let plan = card_plan(&small(layers), &config, gates);
        plan.category_bytes(Category::Activation)
    };
    let model = small(1);
    let [n, d, f, h] = [2 * 1024, model.d_model, model.d_ff, model.num_heads].map(|x| x as u64);
    let gate_up = 2 * n * 2 * f;
    let block = 4 * (2 * n * d + 2 * n) + 2 * (3 * n * d + 2 * n * d) + 4 * h * n + gate_up;
    assert_eq!(activations(5, 0) - activations(4, 0), block);
    assert_eq!(activations(5, 5) - activations(4, 4), block - gate_up);
    assert_eq!(activations(5, 0) - activations(5, 3), 3 * gate_up);
}

/// PyTorch's compiled step took 10,044 MiB there (one H200, bf16); beside a plan, products have 32 MiB to work in.
#[test]
fn small_in_seven_tenths_of_what_pytorch_takes() {
    let plan = card_plan(&small(12), &in_bf16(16), 0);
    let mib = (plan.total_bytes() >> 20) + 32;
    assert!(mib as f64 <= 0.7 * 10_044.0, "{mib} MiB");
}

/// A block's matrices are updated in a row when its backward is over, from gradients that their products have left in bf16 and
/// nobody else sees; vectors at the end. Two blocks' gradients are never alive together.
#[test]
fn gradients_that_pass() {
    let config = PlanConfig {
        optimizer_in_backward: true,
        ..in_bf16(1)
    };
    let plan = card_plan(&small(3), &config, 0);
    let is_update = |call: &Call| matches!(call.op, Op::AdamW { .. });
    let mut rows = Vec::new();
    for row in plan.calls().chunk_by(|a, b| is_update(a) && is_update(b)) {
        let buffers = row.iter().filter(|call| is_update(call));
        let updated: Vec<_> = buffers
            .map(|call| {
                (
                    &plan.buffer(call.writes[0].buffer).name,
                    plan.buffer(call.reads[0].buffer),
                )
            })
            .collect();
        if !updated.is_empty() {
            rows.push(updated);
        }
    }
    assert_eq!(rows.len(), 4); // block 2 with the head, 1, 0; embedding and norms
    for (row, layer) in rows.iter().zip([2, 1, 0]) {
        for (name, gradient) in row.iter().filter(|(name, _)| *name != "lm_head.weight") {
            assert!(name.starts_with(&format!("layers.{layer}.")), "{name}");
            assert_eq!(gradient.dtype, DType::BF16, "{name}");
        }
    }
    assert_eq!(rows[0].len() + rows[1].len() + rows[2].len(), 3 * 7 + 1);
    assert_eq!(rows[3].len(), 3 * 2 + 1 + 1);
    assert!(
        rows[3]
            .iter()
            .all(|(_, gradient)| gradient.dtype == DType::F32)
    );
    for pair in rows[..3].windows(2) {
        let ends = pair[0].iter().map(|(_, gradient)| gradient.live.end).max();
        let begins = pair[1]
            .iter()
            .map(|(_, gradient)| gradient.live.start)
            .min();
        assert!(ends <= begins, "{ends:?}, {begins:?}");
    }
}
