//! One layer's attention, forward, as single ops: scores, softmax and values. For flash attention on a GPU, whose
//! kernels compute all of it in one.

use candle_core::{Device, Tensor};
use tallow::attention::{Algorithm, AttentionConfig, Mask};
use tallow::bench::EndToEnd;
use tallow::profile::{self, Profiler, Recording};
use tallow::{Result, no_grad, ops};

/// The number of recorded runs; one unrecorded run comes first.
const TIMES: usize = 10;

/// Records attention at the run's shape, q, k and v (B, H, T, Dh) in the dtype of the run's matmuls; `None` where the
/// run's kernels tell its parts apart.
pub fn measure(run: &EndToEnd, device: &Device) -> Result<Option<Recording>> {
    if run.config.attention != Algorithm::Flash || !device.is_cuda() {
        return Ok(None);
    }
    let heads = run.config.num_heads;
    let head_dim = run.config.d_model / heads;
    let shape = (run.batch_size, heads, run.sequence_length, head_dim);
    let dtype = run.precision.dtype();
    let [q, k, v] = [0, 1, 2].map(|_| Tensor::randn(0f32, 1.0, shape, device)?.to_dtype(dtype));
    let (q, k, v) = (q?, k?, v?);
    let scale = AttentionConfig::default().scale_for(head_dim);
    let attend = || {
        no_grad(|| {
            let product = |name, a: &Tensor, b: &Tensor, transposed| {
                let _place = profile::range(name);
                match transposed {
                    true => ops::matmul_transposed(a, b),
                    false => ops::matmul(a, b),
                }
            };
            let scores = product("scores", &q, &k, true)?; // (B, H, T, T)
            let p = ops::softmax(&scores, scale, Mask::Causal)?;
            product("values", &p, &v, false)
        })
    };
    attend()?;
    let profiler = Profiler::start_on(device)?;
    for _ in 0..TIMES {
        let _step = profile::step();
        let _phase = profile::phase("forward");
        attend()?;
    }
    Ok(Some(profiler.finish()?))
}
