use candle_core::{DType, Device, Tensor};
use tallow::model::{TransformerConfig, TransformerLM};

#[test]
#[ignore]
fn go() {
    let var = |n: &str| std::env::var(n).unwrap();
    let layers: usize = var("L").parse().unwrap();
    let stack: usize = var("STACK").parse().unwrap();
    let mode = var("MODE");
    let half = std::env::var("HALF").is_ok();
    let go = move || {
        let config = TransformerConfig {
            vocab_size: 3, context_length: 2, d_model: 2, num_layers: layers, num_heads: 1, d_ff: 2,
            checkpointing: mode.parse().unwrap(), ..Default::default()
        };
        let model = TransformerLM::from_var_builder(&config, tallow::nn::seeded(0, DType::F32, &Device::Cpu)).unwrap();
        let t = Tensor::zeros((1, 2), DType::U32, &Device::Cpu).unwrap();
        let p = match half { true => tallow::precision::Precision::BF16, false => tallow::precision::Precision::F32 };
        let loss = p.run(|| model.loss(&t, &t)).unwrap();
        if std::env::var("NOBACK").is_err() { loss.backward().unwrap(); }
        eprintln!("back");
        drop(loss);
        eprintln!("dropped");
    };
    std::thread::Builder::new().stack_size(stack << 10).spawn(go).unwrap().join().unwrap();
}
