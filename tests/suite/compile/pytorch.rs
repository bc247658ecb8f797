//! Planned steps against PyTorch, from the golden files of `fixtures/`.

use super::logits_of;
use crate::check::elements;
use crate::golden::{Golden, bounds, close, close_gradients, close_weights};
use candle_core::{DType, Tensor};
use rstest::rstest;
use tallow::attention::Algorithm;
use tallow::compile::{Step, StepConfig};
use tallow::optim::{Optimizer, decay_matrices_only};
use tallow::precision::Precision;

#[rstest]
fn logits_loss_and_every_gradient(
    #[values("lm_t13", "lm_t37")] name: &str,
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
) {
    let golden = Golden::read(name).with_attention(attention);
    let model = golden.model(DType::F32);
    let (tokens, targets) = (golden.get("tokens"), golden.get("targets"));
    let [logits_bound, loss_bound, gradient_bound] = bounds(DType::F32);
    let mut forward = logits_of(&model, Precision::F32);
    let logits = forward.forward([("tokens", tokens)]).unwrap();
    close("logits", &logits, golden.get("logits"), logits_bound);

    let mut optimizer = Optimizer::new(model.parameters(), golden.hyperparameters).unwrap();
    let mut step = Step::for_model(&model, &optimizer, &StepConfig::default()).unwrap();
    let loss = step.run(&mut optimizer, (tokens, targets)).unwrap();
    let loss = Tensor::new(loss, tokens.device()).unwrap();
    close("loss", &loss, golden.get("loss"), loss_bound);
    close_gradients(&golden.tensors, step.gradients().unwrap(), gradient_bound);
}

#[rstest]
fn ten_steps_of_adamw(
    #[values("lm_t13", "lm_t37")] name: &str,
    #[values("", "clipped.")] prefix: &str,
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
) {
    let golden = Golden::read(name).with_attention(attention);
    let clipped = prefix == "clipped.";
    let model = golden.model(DType::F32);
    let groups = decay_matrices_only(model.parameters(), golden.hyperparameters);
    let optimizer = match clipped {
        true => Optimizer::with_groups(groups),
        false => Optimizer::new(model.parameters(), golden.hyperparameters),
    };
    let mut optimizer = optimizer.unwrap();
    let batch = |key: &str, step| golden.get(key).get(step).unwrap();
    let plan = StepConfig {
        clip_norm: clipped.then_some(0.5),
        ..Default::default()
    };
    let mut step = Step::for_model(&model, &optimizer, &plan).unwrap();
    let wanted = elements(golden.get(&format!("{prefix}losses")));
    for (i, wanted) in wanted.into_iter().enumerate() {
        let (tokens, targets) = (batch("steps.tokens", i), batch("steps.targets", i));
        let loss = step.run(&mut optimizer, (&tokens, &targets)).unwrap();
        let error = (f64::from(loss) - wanted).abs() / wanted;
        assert!(error <= 1e-6, "step {i}: {error:.2e}");
        if clipped {
            let wanted = elements(golden.get("clipped.norms"))[i];
            let error = (step.gradient_norm().unwrap() - wanted).abs() / wanted;
            assert!(error <= 5e-6, "step {i}: {error:.2e}");
        }
    }
    let prefix = format!("{prefix}final.");
    close_weights(&golden.tensors, model.parameters(), &prefix, 2e-5);
}
