//! CS336's communication accounting: feed-forward layers of two products, divided among devices by data, by weights
//! (FSDP) and by columns of weights (tensor parallelism).
//!
//! A block has two weights of D F elements. On N = X Y devices, X by FSDP (or data alone) and Y by tensor parallelism,
//! a device has b tokens, and the forward of a block computes `4 b D F` FLOPs. Meanwhile it receives, in bf16,
//! - by FSDP the weights of its columns from X devices, `(X - 1)/X 4 D F / Y` bytes over M_X links;
//! - by tensor parallelism, of the b Y tokens of its Y devices, the inputs and in parts the outputs,
//!   `(Y - 1)/Y 4 b Y D` bytes over M_Y links.
//!
//! It is bound by compute where the FLOPs take as long as both: from the b of the table on. Data parallelism alone has
//! nothing to receive in forward; its backward, of twice the FLOPs, all-reduces the gradients, `2 (X - 1)/X 4 D F`
//! bytes. ("How to Scale Your Model", Austin et al., 2025, chapter 5.)

use super::common::models::Model;
use super::{Flags, values};
use clap::Args;
use tallow::model::TransformerConfig;
use tallow::report::{Column, Fields, Report};
use tallow::{Error, Result};

/// The devices, and how a model is divided among them. The defaults are the handout's: TPU v5p, 16 by FSDP, 4 by
/// tensor parallelism
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Accounting")]
pub struct AccountingFlags {
    /// X: devices that weights are divided among by FSDP
    #[arg(long, default_value_t = 16, value_parser = values::count())]
    fsdp: usize,

    /// Y: devices that each weight's columns are divided among
    #[arg(long, default_value_t = 4, value_parser = values::count())]
    tensor_parallel: usize,

    /// C: FLOPs of a device a second, in TFLOP/s
    #[arg(long, default_value_t = 460.0, value_name = "TFLOPS")]
    device_tflops: f64,

    /// Bytes of a device a second over one link, in GB/s, both directions together
    #[arg(long, default_value_t = 180.0, value_name = "GB/S")]
    link_gb_s: f64,

    /// M_X: links of a device for FSDP
    #[arg(long, default_value_t = 2, value_parser = values::count())]
    fsdp_links: usize,

    /// M_Y: links of a device for tensor parallelism
    #[arg(long, default_value_t = 1, value_parser = values::count())]
    tensor_links: usize,

    /// Memory of a device, in GB
    #[arg(long, default_value_t = 95.0, value_name = "GB")]
    device_gb: f64,
}

/// Of a model's feed-forward layers.
struct Sizes {
    d: f64,
    f: f64,
    layers: f64,
    tokens: f64,
}

impl Sizes {
    fn parameters(&self) -> f64 {
        self.layers * 2.0 * self.d * self.f
    }

    /// Weights, gradients, and AdamW's two means, all f32.
    fn state_bytes(&self) -> f64 {
        16.0 * self.parameters()
    }

    /// What backward reads: the inputs of both products, bf16.
    fn activation_bytes(&self) -> f64 {
        2.0 * self.layers * self.tokens * (self.d + self.f)
    }

    /// Of a device of `n`, among which state and every second block's activations are divided.
    fn device_bytes(&self, n: f64) -> f64 {
        (self.state_bytes() + self.activation_bytes() / 2.0) / n + self.activation_bytes() / 2.0
    }
}

impl AccountingFlags {
    /// The flags' long names.
    pub const NAMES: &[&str] = &[
        "fsdp",
        "tensor-parallel",
        "device-tflops",
        "link-gb-s",
        "fsdp-links",
        "tensor-links",
        "device-gb",
    ];

    fn validate(&self) -> Result<()> {
        for (field, value) in [
            ("--device-tflops", self.device_tflops),
            ("--link-gb-s", self.link_gb_s),
            ("--device-gb", self.device_gb),
        ] {
            if !(value > 0.0 && value.is_finite()) {
                return Err(Error::Config {
                    config: crate::common::PROGRAM,
                    field,
                    expected: "a number over 0".into(),
                    got: value.to_string(),
                    hint: "the device's data sheet has it".into(),
                });
            }
        }
        Ok(())
    }

    /// The least tokens of a device that its FLOPs take as long as what it receives; `None` if none are enough.
    fn compute_bound(&self, sizes: &Sizes, x: f64, y: f64) -> Option<f64> {
        let (flops, link) = (1e12 * self.device_tflops, 1e9 * self.link_gb_s);
        let of_others = |n: f64| (n - 1.0) / n;
        // Seconds of a block, over 4 D: of b tokens compute takes b F / C.
        let weights = of_others(x) * sizes.f / y / (link * self.fsdp_links as f64);
        let of_a_token = of_others(y) * y / (link * self.tensor_links as f64);
        let left = sizes.f / flops - of_a_token;
        (left > 0.0).then(|| weights / left)
    }

    /// The same, of data parallelism over X devices, in backward.
    fn compute_bound_by_data(&self, x: f64) -> f64 {
        let (flops, link) = (1e12 * self.device_tflops, 1e9 * self.link_gb_s);
        (x - 1.0) / x * flops / (link * self.fsdp_links as f64)
    }
}

pub fn columns() -> Vec<Column> {
    let gb = |key, title| Column::number(key, title, "GB", 1).scaled(1e9).grouped();
    vec![
        Column::text("model", "Model"),
        Column::text("division", "Divided by"),
        Column::text("devices", "Devices"),
        gb("device_bytes", "Memory of each"),
        Column::text("fits", "Fits"),
        Column::number("tokens_of_device", "Compute-bound from b =", "", 0).grouped(),
        Column::number("tokens", "Tokens in all", "", 0).grouped(),
    ]
}

impl Flags {
    pub fn accounting(&self, models: &[Model]) -> Result<Report> {
        let flags = &self.accounting;
        flags.validate()?;
        let (x, y) = (flags.fsdp as f64, flags.tensor_parallel as f64);
        let n = x * y;
        let mut rows = Vec::new();
        let mut notes = Vec::new();
        for model in models {
            let sizes = self.sizes(&model.config);
            let state = sizes.state_bytes();
            let whole = state + sizes.activation_bytes();
            let of_data = flags.compute_bound_by_data(n);
            let mut add = |division: &str, devices: f64, bytes: f64, tokens: Option<f64>| {
                let mut row = Fields::new();
                row.insert("model", model.name.as_str());
                row.insert("division", division);
                row.insert("devices", devices as u64);
                row.insert("device_bytes", bytes);
                let fits = bytes < 1e9 * flags.device_gb;
                row.insert("fits", if fits { "yes" } else { "no" });
                row.insert("tokens_of_device", tokens);
                row.insert("tokens", tokens.map(|tokens| tokens * devices));
                rows.push(row);
            };
            add("nothing", 1.0, whole, Some(0.0));
            add("data", n, whole, Some(of_data));
            let of_weights = flags.compute_bound(&sizes, n, 1.0);
            add(
                "data and weights (FSDP)",
                n,
                sizes.device_bytes(n),
                of_weights,
            );
            let of_both = flags.compute_bound(&sizes, x, y);
            let both = format!("FSDP {x}, tensor {y}");
            add(&both, n, sizes.device_bytes(n), of_both);
            notes.extend(self.memory_in_words(&model.name, &sizes));
        }
        notes.push(format!(
            "A device has b tokens; from the b given on, products take as long as what it receives (forward; of data \
             alone backward), at {} TFLOP/s and {} GB/s a link.",
            flags.device_tflops, flags.link_gb_s
        ));
        Ok(Report {
            title: "Accounting of feed-forward layers".into(),
            columns: columns(),
            rows,
            notes,
            ..Default::default()
        })
    }

    fn sizes(&self, model: &TransformerConfig) -> Sizes {
        Sizes {
            d: model.d_model as f64,
            f: model.d_ff as f64,
            layers: model.num_layers as f64,
            tokens: self.batch_size as f64 * self.context_length as f64,
        }
    }

    fn memory_in_words(&self, name: &str, sizes: &Sizes) -> Vec<String> {
        let device = 1e9 * self.accounting.device_gb;
        let gb = |bytes: f64| format!("{:.1} GB", bytes / 1e9);
        let (state, kept) = (sizes.state_bytes(), sizes.activation_bytes());
        let left = device - kept / 2.0;
        let fewest = match left > 0.0 {
            true => {
                let fewest = ((state + kept / 2.0) / left).floor() + 1.0;
                format!(
                    "from {fewest} devices on a device's part is under {}",
                    gb(device)
                )
            }
            false => format!("no number of devices is enough for {} of each", gb(device)),
        };
        vec![
            format!(
                "{name}: {:.2} G parameters; weights, gradients and AdamW's means in f32 take {}, as much as {:.0} \
                 devices of {} have.",
                sizes.parameters() / 1e9,
                gb(state),
                (state / device).ceil(),
                gb(device),
            ),
            format!(
                "{name}: backward reads {} in bf16 of {} tokens. With all state and half of that divided, (state + \
                 kept / 2) / N + kept / 2, {fewest}.",
                gb(kept),
                sizes.tokens,
            ),
        ]
    }
}
