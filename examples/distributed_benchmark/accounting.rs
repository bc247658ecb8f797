//! CS336's communication accounting: feed-forward layers divided among devices by data, by weights (FSDP) and by the
//! columns of weights (tensor parallelism).
//!
//! A block has `w` weights of D F elements. On N = X Y devices, X by FSDP (or data alone) and Y by tensor parallelism,
//! a device has b tokens, and the forward of a block computes `2 w b D F` FLOPs. Meanwhile it receives, in bf16,
//! - by FSDP the weights of its columns from X devices, `(X - 1)/X 2 w D F / Y` bytes over M_X links;
//! - by tensor parallelism, of the b Y tokens of its Y devices, the inputs and in parts the outputs,
//!   `(Y - 1)/Y 4 b Y D` bytes over M_Y links.
//!
//! It is compute-bound where the FLOPs take as long as both: from the b of the table on. Data parallelism alone receives
//! nothing in forward; its backward, of twice the FLOPs, all-reduces the gradients, `2 (X - 1)/X 2 w D F` bytes. ("How
//! to Scale Your Model", Austin et al., 2025, chapter 5.)

use super::common::models::{Handout, Model};
use super::{Flags, values};
use clap::Args;
use serde::Serialize;
use tallow::Result;
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
    #[arg(
        long,
        hide_short_help = true,
        default_value_t = 460.0,
        value_parser = values::over_0,
        value_name = "C"
    )]
    device_tflops: f64,

    /// Rate of one link of a device, both directions, in GB/s
    #[arg(
        long,
        hide_short_help = true,
        default_value_t = 180.0,
        value_parser = values::over_0,
        value_name = "W"
    )]
    link_gb_s: f64,

    /// M_X and M_Y: links of a device for FSDP and for tensors
    #[arg(long, hide_short_help = true, num_args = 2, value_names = ["M_X", "M_Y"], default_values_t = [2, 1], value_parser = values::count())]
    links: Vec<usize>,

    /// Memory of a device, in GB (10^9 bytes)
    #[arg(
        long,
        hide_short_help = true,
        default_value_t = 95.0,
        value_parser = values::over_0,
        value_name = "GB"
    )]
    device_gb: f64,
}

/// A model's feed-forward layers.
#[derive(Clone, Copy, Debug)]
pub struct Layers {
    pub d: f64,
    pub f: f64,
    pub blocks: f64,
    /// Weights of a block: 2, or 3 of a gated network.
    pub weights: f64,
    /// Tokens in all, whose activations are kept for backward.
    pub tokens: f64,
}

impl Layers {
    /// CS336's XXL: 126 blocks, each with two linear layers.
    fn handout(tokens: f64) -> Self {
        Self {
            d: 16384.0,
            f: 53248.0,
            blocks: 126.0,
            weights: 2.0,
            tokens,
        }
    }

    fn parameters(&self) -> f64 {
        self.blocks * self.weights * self.d * self.f
    }

    /// Weights, gradients and AdamW's two moments, all f32: 16 bytes a parameter.
    fn state_bytes(&self) -> f64 {
        16.0 * self.parameters()
    }

    /// What backward reads, in bf16: a block's input, and what its last weight and its activation take as inputs.
    fn activation_bytes(&self) -> f64 {
        let hidden = if self.weights > 2.0 { 3.0 } else { 1.0 };
        2.0 * self.blocks * self.tokens * (self.d + hidden * self.f)
    }

    /// Bytes of one of `n` devices among which the state and half of the activations are divided.
    fn device_bytes(&self, n: f64) -> f64 {
        (self.state_bytes() + self.activation_bytes() / 2.0) / n + self.activation_bytes() / 2.0
    }

    /// The fewest devices of `bytes` that hold a device's share; `None` if no number does.
    fn fewest_devices(&self, bytes: f64) -> Option<f64> {
        let left = bytes - self.activation_bytes() / 2.0;
        let divided = self.state_bytes() + self.activation_bytes() / 2.0;
        (left > 0.0).then(|| (divided / left).floor() + 1.0)
    }
}

#[derive(Serialize)]
struct Row {
    model: String,
    division: String,
    devices: u64,
    device_bytes: f64,
    fits: &'static str,
    tokens_of_device: Option<f64>,
    tokens: Option<f64>,
}

pub fn columns() -> Vec<Column> {
    let tokens = |key, title| {
        Column::number(key, title, "", 0)
            .grouped()
            .under("Compute-bound from tokens")
    };
    vec![
        Column::text("model", "Model"),
        Column::text("division", "Divided by"),
        Column::text("devices", "Devices"),
        Column::number("device_bytes", "Each holds", "GB", 1)
            .scaled(1e9)
            .grouped(),
        Column::text("fits", "Fits"),
        tokens("tokens_of_device", "of a device"),
        tokens("tokens", "in all"),
    ]
}

impl AccountingFlags {
    /// The flags' long names.
    pub const NAMES: &[&str] = &[
        "fsdp",
        "tensor-parallel",
        "device-tflops",
        "link-gb-s",
        "links",
        "device-gb",
    ];

    /// The fewest tokens of a device with which a block's FLOPs take as long as what the device receives; `None` if no
    /// number is enough. Weights are divided by FSDP among X devices, and their columns among Y, with these links.
    fn compute_bound(&self, layers: &Layers, [x, y]: [usize; 2], links: [usize; 2]) -> Option<f64> {
        let flops = 1e12 * self.device_tflops;
        let [x_rate, y_rate] = links.map(|links| links as f64 * 1e9 * self.link_gb_s);
        let [x, y] = [x as f64, y as f64];
        let weight_elements = layers.weights * layers.d * layers.f;
        let weights = (x - 1.0) / x * 2.0 * weight_elements / y / x_rate;
        let left = 2.0 * weight_elements / flops - (y - 1.0) * 4.0 * layers.d / y_rate;
        (left > 0.0).then(|| weights / left)
    }

    /// [`compute_bound`](Self::compute_bound) where FSDP and tensor parallelism each have their links.
    fn both_bound(&self, layers: &Layers) -> Option<f64> {
        let division = [self.fsdp, self.tensor_parallel];
        self.compute_bound(layers, division, [self.links[0], self.links[1]])
    }
}

impl Flags {
    /// Accounts for the models, or for the handout's where no model is named.
    pub fn accounting(&self, models: &[Model]) -> Result<Report> {
        let flags = &self.accounting;
        let tokens = self.batch_size as f64 * self.length() as f64;
        let layers = models.iter().map(|Model { name, config }| {
            let layers = Layers {
                d: config.d_model as f64,
                f: config.d_ff as f64,
                blocks: config.num_layers as f64,
                weights: config.feed_forward_maps() as f64,
                tokens,
            };
            (name.clone(), layers)
        });
        let is_named = self.models.names_a_model() || self.models.handout == Some(Handout::Of2026);
        let models: Vec<(String, Layers)> = match is_named {
            true => layers.collect(),
            false => vec![("the handout's XXL".into(), Layers::handout(tokens))],
        };
        let (x, y) = (flags.fsdp, flags.tensor_parallel);
        let (n, all_links) = ((x * y) as f64, flags.links.iter().sum());
        let mut report = Report {
            title: "Accounting of feed-forward layers".into(),
            columns: columns(),
            ..Default::default()
        };
        for (name, layers) in &models {
            let whole = layers.state_bytes() + layers.activation_bytes();
            let divided = layers.device_bytes(n);
            let bound = |division, links| flags.compute_bound(layers, division, links);
            // In backward data parallelism has twice the FLOPs, and an all-reduce of twice the weights' bytes: FSDP's
            // bound.
            let by_weights = bound([x * y, 1], [all_links; 2]);
            let by_columns = bound([1, x * y], [all_links; 2]);
            for (division, devices, bytes, bound) in [
                ("nothing".to_string(), 1.0, whole, Some(0.0)),
                ("data".into(), n, whole, by_weights),
                ("weights (FSDP)".into(), n, divided, by_weights),
                ("columns (tensor)".into(), n, divided, by_columns),
                (
                    format!("FSDP {x}, tensor {y}"),
                    n,
                    divided,
                    flags.both_bound(layers),
                ),
            ] {
                report.rows.push(Fields::of(&Row {
                    model: name.clone(),
                    division,
                    devices: devices as u64,
                    device_bytes: bytes,
                    fits: ["no", "yes"][usize::from(bytes < 1e9 * flags.device_gb)],
                    tokens_of_device: bound,
                    tokens: bound.map(|tokens| tokens * devices),
                })?);
            }
            report.answers.extend(match self.models.handout {
                Some(Handout::Of2026) => answers_of_2026(name, layers, flags),
                _ => answers_of_2025(name, layers, flags),
            });
        }
        report.notes.push(format!(
            "Rates: {} TFLOP/s a device, {} GB/s a link; {} links for FSDP, {} for tensor parallelism, one division \
             alone has all of them.",
            flags.device_tflops, flags.link_gb_s, flags.links[0], flags.links[1]
        ));
        Ok(report)
    }
}

/// communication_accounting (a) to (d), of the handout of 2025.
pub fn answers_of_2025(name: &str, layers: &Layers, flags: &AccountingFlags) -> Vec<Answer> {
    let device = 1e9 * flags.device_gb;
    let gb = |bytes: f64| format!("{} GB", group_digits((bytes / 1e9).round() as u64));
    let (x, y) = (flags.fsdp as f64, flags.tensor_parallel as f64);
    let (state, kept) = (layers.state_bytes(), layers.activation_bytes());
    let fewest = match layers.fewest_devices(device) {
        Some(n) => format!("at least {}", counted(n as usize, "device")),
        None => format!(
            "no number: half of the activations alone is {}",
            gb(kept / 2.0)
        ),
    };
    let count = |tokens: f64| group_digits(tokens.ceil() as u64);
    let batch = match flags.both_bound(layers) {
        Some(b) => format!("{} tokens a device, {} in all", count(b), count(b * x * y)),
        None => "no number of tokens".into(),
    };
    vec![
        Answer::new(
            format!("(a) {name}: how much memory do weights, gradients and optimizer state take on one device?"),
            format!(
                "{} parameters in f32 with gradients and AdamW's two moments are 16 bytes each: {}, the memory of {} \
                 of {}. Backward reads {} of activations in bf16, of {} tokens.",
                count(layers.parameters()),
                gb(state),
                counted((state / device).ceil() as usize, "device"),
                gb(device),
                gb(kept),
                count(layers.tokens)
            ),
        ),
        Answer::new(
            format!("(b) {name}: how many devices, with the state and half of the activations divided by FSDP?"),
            format!(
                "A device of N holds (state + kept / 2) / N + kept / 2. For it to be under {}: {fewest}.",
                gb(device)
            ),
        ),
        Answer::new(
            format!("(c) {name}: from which batch is FSDP {x} x tensor {y} bound by compute?"),
            format!(
                "From {batch}: there 2 w b D F / C = (X - 1)/X 2 w D F / (Y M_X W) + (Y - 1) 4 b D / (M_Y W)."
            ),
        ),
        Answer::new(
            format!("(d) {name}: how can the batch be smaller at the same throughput?"),
            "Communication has to shrink with it: divide the weights' columns among more devices (FSDP's bytes go with \
             1/Y), give tensor parallelism as many links as it needs, exchange in 8 bits, and gather the next block's \
             weights while this one computes. Where memory allows, several micro-batches can share one gather."
                .to_string(),
        ),
    ]
}

/// data_parallel_calcs, fsdp_calcs, tp_calcs and fsdp_tp_calcs, of the handout of 2026: how many devices a feed-forward
/// network of w weights divides among before communication takes longer than compute, by B tokens, C FLOP/s a device and
/// W bytes a second out of it, in half precision.
pub fn answers_of_2026(name: &str, layers: &Layers, flags: &AccountingFlags) -> Vec<Answer> {
    let (f, w, b) = (layers.f, layers.weights, layers.tokens);
    let ratio = 1e9 * flags.link_gb_s / (1e12 * flags.device_tflops); // W / C
    let [data, tensor, tensor_backward] = [b, w * f / 2.0, w * f].map(|x| 1.0 + x * ratio);
    let sum = 2.0 * w * f * (1.0 + b * ratio) + 4.0 * b;
    let shared = sum * sum / (32.0 * w * b * f);
    let setting = format!("here {w:.0} weights of D F, B {b:.0}, F {f:.0}, W / C {ratio:.2e}");
    vec![
        Answer::new(
            format!("{name}: data_parallel_calcs. How far does data parallelism scale?"),
            format!(
                "(a) Backward takes 4 w B D F / N FLOPs: two matmuls a weight, a share of the batch each. (b) The \
                 gradients' all-reduce takes 4 w D F (N - 1) / N / W. (c) So N <= 1 + B W / C = {data:.1}, {setting}."
            ),
        ),
        Answer::new(
            format!("{name}: fsdp_calcs. How far does FSDP scale?"),
            format!(
                "(a) 2 w B D F / N FLOPs forward and twice that backward. (b) Forward gathers the weights, 2 w D F \
                 (N - 1) / N / W; backward gathers them again and reduce-scatters the gradients, twice that. (c) So \
                 N <= 1 + B W / C = {data:.1} in both."
            ),
        ),
        Answer::new(
            format!("{name}: tp_calcs. How far does tensor parallelism scale?"),
            format!(
                "(a) dz_i = dy W3_i^T, and dx = all-reduce(dx1_i W1_i^T + dx2_i W2_i^T); the weights' gradients are \
                 local. (b) 2 w B D F / N FLOPs forward, twice that backward. (c) One all-reduce of B D elements in \
                 each: 4 B D (N - 1) / N / W. (d) So N <= 1 + w F W / (2 C) = {tensor:.1} forward, 1 + w F W / C = \
                 {tensor_backward:.1} backward, whatever B is."
            ),
        ),
        Answer::new(
            format!("{name}: fsdp_tp_calcs. How far do both together scale?"),
            format!(
                "(a) 2 w B D F / (X Y) FLOPs forward. (b) max(2 w D F (X - 1) / (X Y), 4 B D (Y - 1) / (X Y)) / W, \
                 where both overlap. (c) X and Y have their own limits then: N <= (1 + B W / C) (1 + w F W / (2 C)) \
                 = {:.1}. (d) Where they share the links the times add: 2 w F X = 4 B Y is best, N <= (2 w B F W / C + \
                 2 w F + 4 B)^2 / (32 w B F) = {shared:.1}.",
                data * tensor
            ),
        ),
    ]
}
