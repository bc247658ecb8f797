//! CS336's communication accounting: feed-forward layers divided among devices by data, by weights (FSDP) and by the
//! columns of weights (tensor parallelism). ("How to Scale Your Model", Austin et al., 2025, chapter 5.)
//!
//! A block has `w` weights of D F elements. On N = X Y devices, X by FSDP (or data alone) and Y by tensor parallelism,
//! each with b tokens, a device receives in forward, in bf16,
//! - by FSDP the weights of its columns, `(X - 1)/X 2 w D F / Y` bytes. Data parallelism has the same bound: it receives
//!   twice as much in backward, which has twice the FLOPs;
//! - by tensor parallelism the inputs and in parts the outputs, `(Y - 1)/Y 4 b Y D` bytes.

use super::common::models::{Handout, Model};
use super::common::values;
use super::{Rank, table};
use clap::Args;
use tallow::model::TransformerConfig;
use tallow::nn::Architecture;
use tallow::report::{Answer, Column, Fields, Report, counted, group_digits};

/// The devices, and how a model is divided among them. The defaults are the handout's: TPU v5p, 16 by FSDP, 4 by
/// tensor parallelism
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Accounting (--part accounting; the defaults are a TPU v5p)")]
pub struct AccountingFlags {
    /// X: devices that FSDP divides weights among
    #[arg(long, default_value_t = 16, value_name = "X", value_parser = values::count())]
    fsdp: usize,

    /// Y: devices that each weight's columns are divided among
    #[arg(long, default_value_t = 4, value_name = "Y", value_parser = values::count())]
    tensor_parallel: usize,

    /// C: arithmetic rate of a device in bf16, in TFLOP/s
    #[arg(long, hide_short_help = true, default_value_t = 460.0, value_name = "C", value_parser = values::over_0)]
    device_tflops: f64,

    /// Rate of one link of a device, both directions, in GB/s
    #[arg(long, hide_short_help = true, default_value_t = 180.0, value_name = "W", value_parser = values::over_0)]
    link_gb_s: f64,

    /// M_X and M_Y: links of a device for FSDP and for tensors
    #[arg(long, hide_short_help = true, num_args = 2, value_names = ["M_X", "M_Y"], default_values_t = [2, 1], value_parser = values::count())]
    links: Vec<usize>,

    /// Memory of a device, in GB (10^9 bytes)
    #[arg(long, hide_short_help = true, default_value_t = 95.0, value_name = "GB", value_parser = values::over_0)]
    device_gb: f64,
}

impl Rank<'_> {
    /// Accounts for the models, or for the handout's where no model is named.
    pub fn accounting(&self) -> Report {
        let (flags, models) = (&self.flags.accounting, &self.flags.models);
        let is_of_2026 = models.handout == Some(Handout::Of2026);
        let xxl = [Model {
            name: "the handout's XXL".into(),
            config: TransformerConfig {
                architecture: Architecture::Gpt2, // two linear layers a block
                d_model: 16384,
                d_ff: 53248,
                num_layers: 126,
                ..Default::default()
            },
        }];
        let models = match is_of_2026 || models.names_a_single_model() {
            true => &self.models[..],
            false => &xxl,
        };
        let tokens = |key, title| Column::count(key, title).group("Compute-bound from tokens");
        let gigabytes = Column::number("device_bytes", "Each holds", "GB", 1);
        let columns = vec![
            Column::text("model", "Model"),
            Column::text("division", "Divided by"),
            Column::text("devices", "Devices"),
            gigabytes.scaled(1e9).grouped(),
            Column::text("fits", "Fits"),
            tokens("tokens_of_device", "of a device"),
            tokens("tokens", "in all"),
        ];
        let note = format!(
            "Rates: {} TFLOP/s a device, {} GB/s a link; {} links for FSDP, {} for tensor parallelism, one division \
             alone has all of them.",
            flags.device_tflops, flags.link_gb_s, flags.links[0], flags.links[1]
        );
        let mut report = table("Accounting of feed-forward layers", columns, &[&note]);
        let (x, y) = (flags.fsdp, flags.tensor_parallel);
        let (n, all_links) = (x * y, [flags.links.iter().sum(); 2]);
        let batch = self.flags.sizes().map(|size| size as f64);
        for Model { name, config } in models {
            let layers = Layers::new(config, batch[0] * batch[1], flags);
            let (whole, divided) = (layers.device_bytes(1), layers.device_bytes(n));
            let by_weights = layers.compute_bound([n, 1], all_links);
            let by_columns = layers.compute_bound([1, n], all_links);
            let by_both = layers.compute_bound([x, y], [flags.links[0], flags.links[1]]);
            for (division, devices, bytes, bound) in [
                ("nothing", 1, whole, Some(0.0)),
                ("data", n, whole, by_weights),
                ("weights (FSDP)", n, divided, by_weights),
                ("columns (tensor)", n, divided, by_columns),
                (&format!("FSDP {x}, tensor {y}"), n, divided, by_both),
            ] {
                let fits = ["no", "yes"][usize::from(bytes < 1e9 * flags.device_gb)];
                let tokens = bound.map(|tokens| (tokens * devices as f64).ceil());
                let mut row = Fields::from_iter([("model", name.as_str()), ("division", division)]);
                row.insert("devices", devices)
                    .insert("device_bytes", bytes)
                    .insert("fits", fits)
                    .insert("tokens_of_device", bound.map(f64::ceil))
                    .insert("tokens", tokens);
                report.rows.push(row);
            }
            let (questions, answers) = match is_of_2026 {
                true => layers.answers_of_2026(),
                false => layers.answers_of_2025(by_both),
            };
            let answers = questions.into_iter().zip(answers);
            let answers =
                answers.map(|(question, text)| Answer::new(format!("{name}: {question}"), text));
            report.answers.extend(answers);
        }
        report
    }
}

/// The questions of an edition of the handout, and their answers.
type Answers = ([&'static str; 4], [String; 4]);

/// The feed-forward layers of a model, trained on these devices.
struct Layers<'f> {
    flags: &'f AccountingFlags,
    d: f64,
    f: f64,
    /// Weights of a block: 2, or 3 of a gated network.
    weights: f64,
    /// Tokens of a batch, on all devices together.
    tokens: f64,
    /// Weights, gradients and AdamW's two moments, all f32: 16 bytes a parameter.
    state_bytes: f64,
    /// Half of the activations in bf16 that are saved for backward: a block's input, and the inputs of its last weight
    /// and of its activation.
    half_bytes: f64,
}

impl<'f> Layers<'f> {
    fn new(config: &TransformerConfig, tokens: f64, flags: &'f AccountingFlags) -> Self {
        let sizes = [config.d_model, config.d_ff, config.num_layers];
        let [d, f, blocks] = sizes.map(|size| size as f64);
        let weights = config.feed_forward_maps() as f64;
        let hidden = if weights > 2.0 { 3.0 } else { 1.0 };
        Self {
            flags,
            d,
            f,
            weights,
            tokens,
            state_bytes: 16.0 * blocks * weights * d * f,
            half_bytes: blocks * tokens * (d + hidden * f),
        }
    }

    /// Returns the memory of one of `n` devices, which divide the state and half of the activations.
    fn device_bytes(&self, n: usize) -> f64 {
        (self.state_bytes + self.half_bytes) / n as f64 + self.half_bytes
    }

    /// Returns the fewest tokens of a device with which a block's FLOPs take as long as what the device receives;
    /// `None` if no number is enough. FSDP divides weights among X devices, and their columns among Y, with these
    /// links.
    fn compute_bound(&self, division: [usize; 2], links: [usize; 2]) -> Option<f64> {
        let [x, y] = division.map(|devices| devices as f64);
        let [x_rate, y_rate] = links.map(|links| links as f64 * 1e9 * self.flags.link_gb_s);
        let weight_elements = self.weights * self.d * self.f;
        let weights = (x - 1.0) / x * 2.0 * weight_elements / y / x_rate;
        let flops = 2.0 * weight_elements / (1e12 * self.flags.device_tflops);
        let left = flops - (y - 1.0) * 4.0 * self.d / y_rate;
        (left > 0.0).then(|| weights / left)
    }

    /// Answers communication_accounting of the handout of 2025. `bound` is of FSDP with tensor parallelism.
    fn answers_of_2025(&self, bound: Option<f64>) -> Answers {
        let (x, y) = (self.flags.fsdp, self.flags.tensor_parallel);
        let (bytes, half, state) = (
            1e9 * self.flags.device_gb,
            self.half_bytes,
            self.state_bytes,
        );
        let gb = |bytes: f64| match bytes / 1e9 {
            small if small < 10.0 => format!("{small:.2} GB"),
            large => format!("{} GB", group_digits(large.round() as u64)),
        };
        let [device, state_gb, kept, half_gb] = [bytes, state, 2.0 * half, half].map(gb);
        let count = |number: f64| group_digits(number.ceil() as u64);
        let [parameters, tokens] = [state / 16.0, self.tokens].map(count);
        let devices = |number: f64| counted(number as usize, "device");
        let held = devices((state / bytes).ceil());
        let fewest = devices(((state + half) / (bytes - half)).floor() + 1.0);
        let fewest = match bytes > half {
            true => format!("at least {fewest}"),
            false => format!("no number: half of the activations alone is {half_gb}"),
        };
        let batch = match bound.map(|b| [b, b * (x * y) as f64].map(count)) {
            Some([own, all]) => format!("{own} tokens a device, {all} in all"),
            None => "no number of tokens".into(),
        };
        let questions = [
            "(a) how much memory do weights, gradients and optimizer state take on one device?",
            "(b) how many devices, with the state and half of the activations divided by FSDP?",
            "(c) from which batch is FSDP with tensor parallelism bound by compute?",
            "(d) how can the batch be smaller at the same throughput?",
        ];
        let answers = [
            format!(
                "{parameters} parameters in f32 with gradients and AdamW's two moments are 16 bytes each: {state_gb}, \
                 the memory of {held} of {device}. Backward reads {kept} of activations in bf16, of {tokens} tokens."
            ),
            format!(
                "A device of N holds (state + activations / 2) / N + activations / 2. To be under {device}: {fewest}."
            ),
            format!(
                "FSDP {x} x tensor {y}: from {batch}. There 2 w b D F / C = (X - 1)/X 2 w D F / (Y M_X W) + (Y - 1) 4 \
                 b D / (M_Y W), for b tokens a device, w weights of D F in a block, C FLOP/s a device, and M_X and M_Y \
                 links of W bytes a second for FSDP X and tensor Y."
            ),
            "Send less: divide the weights' columns among more devices (FSDP's bytes go with 1/Y), exchange in 8 bits, \
             or let several micro-batches share a gather where memory allows. Or hide it: give tensor parallelism more \
             links, and gather the next block's weights while this one computes."
                .into(),
        ];
        (questions, answers)
    }

    /// Answers data_parallel_calcs, fsdp_calcs, tp_calcs and fsdp_tp_calcs, of the handout of 2026: how many devices a
    /// feed-forward network of w weights divides among before communication takes longer than compute, by B tokens, C
    /// FLOP/s a device and W bytes a second out of it, in half precision.
    fn answers_of_2026(&self) -> Answers {
        let (f, w, b) = (self.f, self.weights, self.tokens);
        let ratio = 1e9 * self.flags.link_gb_s / (1e12 * self.flags.device_tflops); // W / C
        let [data, tensor, tensor_backward] = [b, w * f / 2.0, w * f].map(|x| 1.0 + x * ratio);
        let sum = 2.0 * w * f * (1.0 + b * ratio) + 4.0 * b;
        let (both, shared) = (data * tensor, sum * sum / (32.0 * w * b * f));
        let questions = [
            "data_parallel_calcs. How far does data parallelism scale?",
            "fsdp_calcs. How far does FSDP scale?",
            "tp_calcs. How far does tensor parallelism scale?",
            "fsdp_tp_calcs. How far do both together scale?",
        ];
        let answers = [
            format!(
                "(a) Backward takes 4 w B D F / N FLOPs: two matmuls a weight. (b) The gradients' all-reduce takes 4 w \
                 D F (N - 1) / N / W. (c) So N <= 1 + B W / C = {data:.1}, here {w:.0} weights of D F, B {b:.0}, F \
                 {f:.0}, W / C {ratio:.2e}."
            ),
            format!(
                "(a) 2 w B D F / N FLOPs forward and twice that backward. (b) Forward gathers the weights, 2 w D F (N - \
                 1) / N / W; backward gathers them again and reduce-scatters the gradients, twice that. (c) So N <= 1 \
                 + B W / C = {data:.1} in both."
            ),
            format!(
                "(a) dz_i = dy W3_i^T, and dx = all-reduce(dx1_i W1_i^T + dx2_i W2_i^T); the weights' gradients are \
                 local. (b) 2 w B D F / N FLOPs forward, twice that backward. (c) One all-reduce of B D elements in \
                 each: 4 B D (N - 1) / N / W. (d) So N <= 1 + w F W / (2 C) = {tensor:.1} forward, 1 + w F W / C = \
                 {tensor_backward:.1} backward, whatever B is."
            ),
            format!(
                "(a) 2 w B D F / (X Y) FLOPs forward. (b) max(2 w D F (X - 1) / (X Y), 4 B D (Y - 1) / (X Y)) / W, \
                 where both overlap. (c) X and Y have their own limits then: N <= (1 + B W / C) (1 + w F W / (2 C)) = \
                 {both:.1}. (d) Where they share the links the times add: 2 w F X = 4 B Y is best, N <= (2 w B F W / C \
                 + 2 w F + 4 B)^2 / (32 w B F) = {shared:.1}."
            ),
        ];
        (questions, answers)
    }
}
