//! Probe ranges: the paths of a model's ops, and that listeners do not change results.

use crate::check::bits;
use candle_core::{DType, Device, Tensor};
use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};
use tallow::attention::Algorithm;
use tallow::model::{TransformerConfig, TransformerLM};
use tallow::optim::{AdamWConfig, Optimizer};
use tallow::precision::Precision;
use tallow::probe::{self, Event, Kind, Listener, Path};

/// Records one thread's ranges, in order. Other tests run at the same time and are heard too.
struct Log {
    thread: ThreadId,
    lines: Mutex<Vec<(Kind, String, String, bool)>>,
}

impl Log {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            thread: thread::current().id(),
            lines: Mutex::default(),
        })
    }

    fn is_on_this_thread(&self) -> bool {
        thread::current().id() == self.thread
    }
}

impl Listener for Log {
    fn on_leave(&self, event: &Event<'_>) {
        if self.is_on_this_thread() {
            let is_op = matches!(event.kind, Kind::Op | Kind::OpBackward);
            assert!(event.operands.is_none() || is_op);
            let line = (
                event.kind,
                event.path.to_string(),
                event.phase.to_string(),
                event.in_order,
            );
            self.lines.lock().unwrap().push(line);
        }
    }
}

fn config() -> TransformerConfig {
    TransformerConfig {
        vocab_size: 20,
        context_length: 8,
        d_model: 16,
        num_layers: 2,
        num_heads: 2,
        d_ff: 32,
        ..Default::default()
    }
}

/// Returns the bits of a step's loss and first weights.
fn step(attention: Algorithm, precision: Precision) -> [Vec<u64>; 2] {
    let model = TransformerLM::new(&config(), 3, &Device::Cpu).unwrap();
    let model = model.with_attention(attention).unwrap();
    let mut optimizer = Optimizer::new(model.parameters(), AdamWConfig::default()).unwrap();
    let tokens = Tensor::from_vec((0u32..16).collect(), (2, 8), &Device::Cpu).unwrap();
    let loss = {
        let _phase = probe::phase("forward");
        precision.run(|| model.loss(&tokens, &tokens)).unwrap()
    };
    let gradients = {
        let _phase = probe::phase("backward");
        loss.backward().unwrap()
    };
    {
        let _phase = probe::phase("optimizer");
        optimizer.step(&gradients).unwrap();
    }
    let (_, weight) = &model.parameters()[3];
    assert_eq!(weight.dtype(), DType::F32);
    [bits(&loss), bits(weight)]
}

#[test]
fn a_model_says_where_it_is() {
    for attention in [Algorithm::Naive, Algorithm::Flash] {
        let silent = step(attention, Precision::F32);
        let log = Log::new();
        let listening = probe::listen(log.clone());
        let heard = step(attention, Precision::F32);
        drop(listening);
        step(attention, Precision::F32); // without a listener
        assert_eq!(silent, heard);

        let lines = log.lines.lock().unwrap();
        assert!(lines.iter().all(|(.., in_order)| *in_order));
        let of = |kind: Kind| {
            let of_kind = lines.iter().filter(move |line| line.0 == kind);
            of_kind.map(|line| line.1.clone()).collect::<Vec<_>>()
        };
        let (forward, mut backward) = (of(Kind::Op), of(Kind::OpBackward));
        let name = match attention {
            Algorithm::Naive => "attention::naive",
            Algorithm::Flash => "attention::flash",
        };
        for path in [
            "token_embeddings/embedding",
            "layers.0/ln1/rms_norm",
            "layers.0/attn/q_proj/linear",
            "layers.1/attn/q_proj/rope",
            &format!("layers.1/attn/{name}"),
            "layers.1/add",
            "layers.1/ffn/w1, w3/swiglu_linear",
            "layers.1/ffn/w2/linear",
            "ln_final/rms_norm",
            "lm_head/linear_cross_entropy",
            "adamw",
        ] {
            assert!(forward.iter().any(|p| p == path), "{path} in {forward:?}");
        }
        // Backward runs in reverse order, each op with the path that it had in forward.
        backward.reverse();
        let mut trained: Vec<_> = forward.iter().filter(|p| *p != "adamw").cloned().collect();
        assert_eq!(backward.first(), trained.first());
        backward.sort();
        trained.sort();
        assert_eq!(backward, trained);

        let phase_of = |kind: Kind, path: &str| {
            let line = lines.iter().find(|line| line.0 == kind && line.1 == path);
            line.map(|line| line.2.clone()).unwrap()
        };
        assert_eq!(phase_of(Kind::Op, "ln_final/rms_norm"), "forward");
        assert_eq!(phase_of(Kind::OpBackward, "ln_final/rms_norm"), "backward");
        assert_eq!(phase_of(Kind::Op, "adamw"), "optimizer");
        assert_eq!(of(Kind::Phase).len(), 3);
    }
}

#[test]
fn ranges_left_out_of_order_say_so() {
    let log = Log::new();
    let listening = probe::listen(log.clone());
    let outer = probe::range("outer");
    let inner = probe::range(String::from("inner"));
    drop(outer);
    drop(inner);
    drop(listening);
    let lines = log.lines.lock().unwrap();
    let ranges: Vec<_> = lines.iter().map(|line| (line.1.as_str(), line.3)).collect();
    assert_eq!(ranges, [("outer", false), ("outer/inner", false)]);
}

#[test]
fn paths_are_chains_of_names() {
    let layer = Path::ROOT.child("layers.7");
    let weight = layer.child("attn").child("q_proj");
    assert_eq!(weight.to_string(), "layers.7/attn/q_proj");
    assert_eq!(
        weight,
        Path::ROOT.child("layers.7").child("attn").child("q_proj")
    );
    assert_eq!(
        (weight.name(), weight.parent()),
        ("q_proj".into(), Some(layer.child("attn")))
    );
    assert_eq!(
        (Path::ROOT.to_string(), Path::ROOT.parent()),
        ("-".into(), None)
    );
}
