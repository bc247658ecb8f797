//! One layer's attention taken apart: scores, softmax and values as ops of their own, forward.

use candle_core::{Device, Tensor};
use tallow::attention::{self, AttentionConfig, Mask};
use tallow::bench::EndToEnd;
use tallow::profile::{self, Profiler, Recording};
use tallow::{Result, no_grad};

/// How often it runs; once more before that, unrecorded.
const TIMES: usize = 10;

/// Records attention at the run's shape, q, k and v (B, H, T, Dh), composed of three ops.
pub fn measure(run: &EndToEnd, device: &Device) -> Result<Recording> {
    let heads = run.config.num_heads;
    let shape = (
        run.batch_size,
        heads,
        run.sequence_length,
        run.config.d_model / heads,
    );
    let dtype = run.precision.parameter_dtype();
    let [q, k, v] = [0, 1, 2].map(|_| Tensor::randn(0f32, 1.0, shape, device)?.to_dtype(dtype));
    let (q, k, v) = (q?, k?, v?);
    let config = AttentionConfig {
        mask: Mask::Causal,
        scale: None,
    };
    let attend = || {
        let attend = || attention::naive::reference(&q, &k, &v, &config);
        no_grad(|| run.precision.run(attend))
    };
    attend()?;
    let profiler = Profiler::start_on(device)?;
    for _ in 0..TIMES {
        let _step = profile::step();
        let _phase = profile::phase("forward");
        attend()?;
    }
    profiler.finish()
}
