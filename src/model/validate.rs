//! Validation of a configuration.

use super::{TransformerConfig, gpt2};
use crate::attention::{Algorithm, FLASH_MAX_HEAD_DIM};
use crate::nn::Architecture;
use crate::nn::check_eps;
use crate::ops::Gelu;
use crate::ops::soft_cap::check_cap;
use crate::{Error, Result};

impl TransformerConfig {
    /// Checks the configuration.
    ///
    /// # Errors
    /// [`Error::Config`] names the field: a size of 0; a d_model that num_heads does not divide (unless head_dim is
    /// set); a num_heads that num_kv_heads does not divide; an odd head dimension (rotary embedding needs pairs); an
    /// invalid scaling; a theta, eps, cap or scale that is not positive; a number of parameters that overflows; a
    /// dropout rate outside [0, 1); a padding id outside the vocabulary; a setting that the architecture does not
    /// support.
    pub fn validate(&self) -> Result<()> {
        let refuse = |field, expected: &str, got: String, hint: &str| {
            Err(Error::config("TransformerConfig", field, got).must_be(expected, hint))
        };
        let sizes = [
            ("vocab_size", self.vocab_size),
            ("context_length", self.context_length),
            ("d_model", self.d_model),
            ("num_layers", self.num_layers),
            ("num_heads", self.num_heads),
            ("d_ff", self.d_ff),
            ("num_kv_heads", self.num_kv_heads()),
            ("head_dim", self.head_dim.unwrap_or(1)),
        ];
        for (field, size) in sizes {
            if size == 0 {
                return refuse(field, "positive", "0".into(), "every size counts something");
            }
            if size > u32::MAX as usize {
                return refuse(
                    field,
                    "under 2^32",
                    size.to_string(),
                    "no memory holds that",
                );
            }
        }
        if self.num_parameters() > isize::MAX as usize / size_of::<f64>() {
            return refuse(
                "d_model",
                "such that all parameters have an address",
                format!("{} parameters or more", self.num_parameters()),
                "no memory holds that",
            );
        }
        if !self.num_heads.is_multiple_of(self.num_kv_heads()) {
            return refuse(
                "num_heads",
                &format!("divisible by num_kv_heads {}", self.num_kv_heads()),
                self.num_heads.to_string(),
                "each head of k and v serves as many heads of q",
            );
        }
        if self.head_dim.is_none() && !self.d_model.is_multiple_of(self.num_heads) {
            return refuse(
                "d_model",
                &format!("divisible by num_heads {}", self.num_heads),
                self.d_model.to_string(),
                "each head gets d_model / num_heads elements, unless head_dim says otherwise",
            );
        }
        if !self.is_gpt2() && !self.head_dim().is_multiple_of(2) {
            let (field, expected) = match self.head_dim {
                Some(_) => ("head_dim", "even"),
                None => ("num_heads", "such that d_model / num_heads is even"),
            };
            return refuse(
                field,
                expected,
                format!("a head dimension of {}", self.head_dim()),
                "rotary positions turn pairs of elements",
            );
        }
        if let Some(id) = self.padding_id
            && id as usize >= self.vocab_size
        {
            return refuse(
                "padding_id",
                &format!("under vocab_size {}", self.vocab_size),
                id.to_string(),
                "it is the token whose embedding gets no gradient, if there is one",
            );
        }
        if self.gelu != Gelu::Tanh && self.architecture == Architecture::Llama {
            return refuse(
                "gelu",
                "Tanh where architecture is Llama",
                format!("{:?}", self.gelu),
                "only GPT-2 and Gemma 2 have a GELU; leave it out",
            );
        }
        if self.qk_norm && self.architecture == Architecture::Gemma2 {
            return refuse(
                "qk_norm",
                "false where architecture is Gemma2",
                "true".into(),
                "Gemma 2 normalises no heads; leave it out",
            );
        }
        let caps = [
            ("attention_soft_cap", self.attention_soft_cap),
            ("logit_soft_cap", self.logit_soft_cap),
        ];
        for (field, cap) in caps {
            cap.map_or(Ok(()), |cap| check_cap("TransformerConfig", field, cap))?;
        }
        if let Some(scale) = self.attention_scale
            && !(scale > 0.0 && scale.is_finite())
        {
            return refuse(
                "attention_scale",
                "positive and finite",
                scale.to_string(),
                "leave it out for 1 / sqrt(head_dim)",
            );
        }
        if !(self.rope_theta > 0.0 && self.rope_theta.is_finite()) {
            return refuse(
                "rope_theta",
                "positive and finite",
                self.rope_theta.to_string(),
                "the presets use 10000",
            );
        }
        self.rope_scaling.check()?;
        self.dropout.check("TransformerConfig")?;
        if self.is_gpt2() {
            gpt2::check(self)?;
        }
        check_eps("TransformerConfig", "norm_eps", self.norm_eps)
    }

    /// Checks that a model of this configuration can compute attention with `algorithm`.
    ///
    /// # Errors
    /// [`Error::Config`] for flash attention with a head dimension over [`FLASH_MAX_HEAD_DIM`].
    pub fn check_attention(&self, algorithm: Algorithm) -> Result<()> {
        if algorithm == Algorithm::Naive || self.head_dim() <= FLASH_MAX_HEAD_DIM {
            return Ok(());
        }
        let got = format!("flash for heads of {}", self.head_dim());
        Err(Error::config("TransformerLM", "attention", got).must_be(
            format!("naive where a head has more than {FLASH_MAX_HEAD_DIM} elements"),
            "choose naive, or more heads",
        ))
    }
}
