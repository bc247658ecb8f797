//! Names, shapes, order and count of a model's parameters.

use super::*;
use tallow::nn::Layer;

#[test]
fn names_shapes_and_order() {
    let model = mini_model(0);
    let got: Vec<(String, Vec<usize>)> = model
        .parameters()
        .into_iter()
        .map(|(name, var)| (name, var.dims().to_vec()))
        .collect();
    let mut wanted: Vec<(String, Vec<usize>)> = Vec::new();
    let mut add = |name: &str, shape: &[usize]| wanted.push((name.into(), shape.to_vec()));
    add("token_embeddings.weight", &[29, 18]);
    for layer in ["layers.0", "layers.1"] {
        add(&format!("{layer}.ln1.weight"), &[18]);
        for projection in ["q_proj", "k_proj", "v_proj", "output_proj"] {
            add(&format!("{layer}.attn.{projection}.weight"), &[18, 18]);
        }
        add(&format!("{layer}.ln2.weight"), &[18]);
        add(&format!("{layer}.ffn.w1.weight"), &[25, 18]);
        add(&format!("{layer}.ffn.w2.weight"), &[18, 25]);
        add(&format!("{layer}.ffn.w3.weight"), &[25, 18]);
    }
    add("ln_final.weight", &[18]);
    add("lm_head.weight", &[29, 18]);
    assert_eq!(got, wanted);

    let announced = model.config().parameter_shapes().into_iter();
    let announced: Vec<_> = announced.map(|(n, s)| (n, s.into_dims())).collect();
    assert_eq!(announced, wanted);
    assert_eq!(model.config(), &mini());
    assert!(model.device().is_cpu());
}

/// With more than nine layers the order is numeric, not alphabetic.
#[test]
fn layers_are_in_the_order_they_run() {
    let config = TransformerConfig {
        num_layers: 12,
        ..mini()
    };
    let model = TransformerLM::new(&config, 0, &CPU).unwrap();
    let norms: Vec<String> = model
        .parameters()
        .into_iter()
        .map(|(name, _)| name)
        .filter(|name| name.ends_with("ln1.weight"))
        .collect();
    let wanted: Vec<String> = (0..12).map(|i| format!("layers.{i}.ln1.weight")).collect();
    assert_eq!(norms, wanted);
}

#[test]
fn counts_of_real_models() {
    for config in [mini(), TransformerConfig::default()] {
        let model = TransformerLM::new(&config, 0, &CPU).unwrap();
        assert_eq!(model.num_parameters(), config.num_parameters());
        let elements = model.parameters().into_iter().map(|(_, v)| v.elem_count());
        assert_eq!(elements.sum::<usize>(), config.num_parameters());
    }
    assert_eq!(
        mini().num_parameters(),
        2 * 29 * 18 + 2 * (4 * 18 * 18 + 3 * 18 * 25 + 2 * 18) + 18
    );
}

/// The variables are shared with the model, so an optimizer can update them.
#[test]
fn parameters_are_shared_with_the_model() {
    let model = mini_model(0);
    let tokens = ids(29, 1, 5);
    let before = model.forward(&tokens).unwrap();
    let clone = model.clone();
    for (name, var) in model.parameters() {
        let kept = var.as_tensor().copy().unwrap();
        var.set(&(&kept * 1.5).unwrap()).unwrap();
        assert_ne!(
            bits(&model.forward(&tokens).unwrap()),
            bits(&before),
            "{name}"
        );
        var.set(&kept).unwrap();
        assert_eq!(
            bits(&clone.forward(&tokens).unwrap()),
            bits(&before),
            "{name}"
        );
    }
    // A clone shares them too.
    let (_, var) = clone.parameters().remove(0);
    var.set(&var.zeros_like().unwrap()).unwrap();
    assert_ne!(bits(&model.forward(&tokens).unwrap()), bits(&before));
}

/// A model is a layer like its parts: `visit` prefixes its names with any path.
#[test]
fn names_go_under_a_path() {
    let mut names = Vec::new();
    mini_model(0).visit("teacher", &mut |name, _| names.push(name));
    let wanted = mini().parameter_shapes().into_iter();
    let wanted: Vec<String> = wanted.map(|(name, _)| format!("teacher.{name}")).collect();
    assert_eq!(names, wanted);
}
