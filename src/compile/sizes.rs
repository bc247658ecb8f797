//! The sizes of attention as kernels take them.

use super::attention::HeadAttentionSizes;
use super::op::AttentionSizes;
use crate::kernels::Mask;
use crate::kernels::cpu::{flash_attention, heads::Heads, rotary_attention};

impl AttentionSizes {
    /// As the kernels on heads take them.
    pub(super) fn heads(&self) -> Heads {
        Heads {
            batch: self.batch,
            length: self.length,
            heads: self.heads,
            head_dim: self.head_dim,
        }
    }

    /// As flash attention's kernels take them.
    pub(super) fn flash(&self) -> flash_attention::Sizes {
        flash_attention::Sizes {
            batch: self.batch,
            heads: self.heads,
            kv_heads: self.heads,
            queries: self.length,
            keys: self.length,
            head_dim: self.head_dim,
            mask: Mask::Causal,
            scale: self.scale,
        }
    }

    /// As naive attention's kernel on the CPU takes them.
    pub(super) fn rotary(&self) -> rotary_attention::Sizes {
        rotary_attention::Sizes {
            heads: self.heads(),
            scale: self.scale,
        }
    }
}

impl HeadAttentionSizes {
    /// As flash attention's kernels take them.
    pub(super) fn flash(&self) -> flash_attention::Sizes {
        flash_attention::Sizes {
            batch: self.matrices,
            heads: 1,
            kv_heads: 1,
            queries: self.length,
            keys: self.length,
            head_dim: self.head_dim,
            mask: self.mask,
            scale: self.scale,
        }
    }
}
