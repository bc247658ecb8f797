//! CS336's communication accounting: feed-forward layers divided among devices by data, by weights (FSDP) and by the
//! columns of weights (tensor parallelism). ("How to Scale Your Model", Austin et al., 2025, chapter 5.)

use super::common::models::{Handout, Model};
use super::common::values;
use super::common::words::answered;
use super::{Rank, table};
use clap::Args;
use serde::Serialize;
use tallow::model::TransformerConfig;
use tallow::nn::Architecture;
use tallow::report::{Column, Fields, Report, counted, group_digits};

/// The devices, and how a model is divided among them. The defaults are the handout's: TPU v5p, 16 by FSDP, 4 by
/// tensor parallelism
#[derive(Args, Clone, Debug, Serialize)]
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
        let note = "One division alone has the links of both.";
        let mut report = table("Accounting of feed-forward layers", columns, &[note]);
        let (x, y) = (flags.fsdp, flags.tensor_parallel);
        let (n, both, links) = (
            x * y,
            format!("FSDP {x}, tensor {y}"),
            [flags.links[0], flags.links[1]],
        );
        let all_links = [links[0] + links[1]; 2];
        for Model { name, config } in models {
            let layers = Layers::new(config, self.flags.sizes().iter().product(), flags);
            for (division, [x, y], links, shards) in [
                ("nothing", [1, 1], all_links, 1),
                ("data", [n, 1], all_links, 1),
                ("weights (FSDP)", [n, 1], all_links, n),
                ("columns (tensor)", [1, n], all_links, n),
                (&both, [x, y], links, n),
            ] {
                let (devices, bound) = (x * y, layers.compute_bound([x, y], links));
                let bytes = layers.device_bytes(shards);
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
                true => (QUESTIONS_OF_2026, layers.answers_of_2026()),
                false => (QUESTIONS_OF_2025, layers.answers_of_2025()),
            };
            let questions = questions.map(|question| format!("{name}: {question}"));
            let answers = questions.into_iter().zip(answers.map(Some));
            report.answers.extend(answered(answers));
        }
        report
    }
}

const QUESTIONS_OF_2025: [&str; 4] = [
    "(a) how much memory do weights, gradients and optimizer state take on one device?",
    "(b) how many devices, with the state and half of the activations divided by FSDP?",
    "(c) from which batch is FSDP with tensor parallelism bound by compute?",
    "(d) how can the batch be smaller at the same throughput?",
];

const QUESTIONS_OF_2026: [&str; 4] = [
    "data_parallel_calcs. How far does data parallelism scale?",
    "fsdp_calcs. How far does FSDP scale?",
    "tp_calcs. How far does tensor parallelism scale?",
    "fsdp_tp_calcs. How far do both together scale?",
];

/// The feed-forward layers of a model, trained on these devices.
struct Layers<'f> {
    flags: &'f AccountingFlags,
    d: f64,
    f: f64,
    /// Weights of a block: 2, or 3 of a gated network.
    weights: f64,
    /// Tokens of a batch.
    tokens: f64,
    /// Weights, gradients and AdamW's two moments, all f32: 16 bytes a parameter.
    state_bytes: f64,
    /// Half of the activations in bf16 that are saved for backward: a block's input, and the inputs of its last weight
    /// and of its activation.
    half_bytes: f64,
}

impl<'f> Layers<'f> {
    fn new(config: &TransformerConfig, tokens: usize, flags: &'f AccountingFlags) -> Self {
        let sizes = [config.d_model, config.d_ff, config.num_layers, tokens];
        let [d, f, blocks, tokens] = sizes.map(|size| size as f64);
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

    /// Answers communication_accounting of the handout of 2025.
    fn answers_of_2025(&self) -> [String; 4] {
        let (x, y) = (self.flags.fsdp, self.flags.tensor_parallel);
        let (device_gb, bytes) = (self.flags.device_gb, 1e9 * self.flags.device_gb);
        let (state, half) = (self.state_bytes, self.half_bytes);
        let gb = |bytes: f64| format!("{:.2} GB", bytes / 1e9);
        let [state_gb, kept, half_gb] = [state, 2.0 * half, half].map(gb);
        let count = |number: f64| group_digits(number.ceil() as u64);
        let [parameters, tokens] = [state / 16.0, self.tokens].map(count);
        let devices = |number: f64| counted(number as usize, "device");
        let held = devices((state / bytes).ceil());
        let fewest = match bytes > half {
            true => format!(
                "at least {}",
                devices(((state + half) / (bytes - half)).floor() + 1.0)
            ),
            false => format!("no number of devices, half of the activations is {half_gb}"),
        };
        let bound = self.compute_bound([x, y], [self.flags.links[0], self.flags.links[1]]);
        let batch = match bound.map(|b| [b, b * (x * y) as f64].map(count)) {
            Some([own, all]) => format!("{own} tokens a device, {all} in all"),
            None => "no number of tokens".into(),
        };
        [
            format!(
                "{parameters} parameters x 16 bytes (weight, gradient and AdamW's two moments in f32) = {state_gb}, \
                 the memory of {held}. Backward reads {kept} of bf16 activations of {tokens} tokens."
            ),
            format!("(state + activations / 2) / N + activations / 2 < {device_gb} GB: {fewest}."),
            format!(
                "FSDP X = {x}, tensor Y = {y}: from {batch}. With b tokens a device, w weights of D F a block, C \
                 FLOP/s and M_X and M_Y links of W bytes/s, 2 w b D F / C = (X - 1)/X 2 w D F / (Y M_X W) + (Y - 1) 4 \
                 b D / (M_Y W)."
            ),
            "Send less: a larger Y (FSDP's bytes go with 1/Y), an exchange in 8 bits, several micro-batches for each \
             gather. Or hide it: more links for tensors, the next block's weights gathered during compute."
                .into(),
        ]
    }

    /// Answers data_parallel_calcs, fsdp_calcs, tp_calcs and fsdp_tp_calcs, of the handout of 2026: how many devices a
    /// feed-forward network divides among before communication takes longer than compute.
    fn answers_of_2026(&self) -> [String; 4] {
        let (f, w, b) = (self.f, self.weights, self.tokens);
        let ratio = 1e9 * self.flags.link_gb_s / (1e12 * self.flags.device_tflops); // W / C
        let [data, forward, backward] = [b, w * f / 2.0, w * f].map(|x| 1.0 + x * ratio);
        let sum = 2.0 * w * f * (1.0 + b * ratio) + 4.0 * b;
        let (both, shared) = (data * forward, sum * sum / (32.0 * w * b * f));
        [
            format!(
                "(a) Backward: 4 w B D F / N FLOPs, two matmuls a weight. (b) All-reduce of the gradients: 4 w D F (N \
                 - 1) / N / W. (c) N <= 1 + B W / C = {data:.1} for w {w}, B {b}, F {f}, W / C {ratio:.2e}."
            ),
            format!(
                "(a) 2 w B D F / N FLOPs forward, twice that backward. (b) Forward gathers the weights: 2 w D F (N - \
                 1) / N / W. Backward gathers them and reduce-scatters the gradients: twice that. (c) N <= 1 + B W / \
                 C = {data:.1} in both."
            ),
            format!(
                "(a) dz_i = dy W3_i^T, dx = all-reduce(dx1_i W1_i^T + dx2_i W2_i^T); the weights' gradients are \
                 local. (b) FLOPs as with FSDP. (c) An all-reduce of B D elements in each: 4 B D (N - 1) / N / W. (d) \
                 N <= 1 + w F W / (2 C) = {forward:.1} forward, 1 + w F W / C = {backward:.1} backward, whatever B is."
            ),
            format!(
                "(a) 2 w B D F / (X Y) FLOPs forward. (b) max(2 w D F (X - 1), 4 B D (Y - 1)) / (X Y W), if both \
                 overlap. (c) N <= (1 + B W / C) (1 + w F W / (2 C)) = {both:.1}: X and Y have their own limits. (d) \
                 On shared links the times add. Best is 2 w F X = 4 B Y: N <= (2 w B F W / C + 2 w F + 4 B)^2 / (32 w \
                 B F) = {shared:.1}."
            ),
        ]
    }
}
