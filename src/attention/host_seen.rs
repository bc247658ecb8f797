//! The visible pairs of queries and keys on the host, for reference implementations.

use super::AttentionConfig;
use super::masks::MaskTensors;
use crate::kernels::attention::{PerScore, Sizes};
use candle_core::{Device, Result, Tensor};

/// The keys that each query attends to, by all masks.
pub(super) struct HostSeen {
    sizes: Sizes,
    /// (B, Tq), or empty.
    first_keys: Vec<u32>,
    /// The key mask, and where a bias is not -inf: 0 hides. With dimensions of (B, H, Tq, Tk) or 1.
    visible: Vec<(Vec<u8>, [usize; 4])>,
}

impl HostSeen {
    pub(super) fn new(
        config: &AttentionConfig,
        masks: &MaskTensors,
        sizes: &Sizes,
    ) -> Result<Self> {
        let to_host = |visible: &Tensor| {
            let (batch, heads, queries, keys) = visible.dims4()?;
            let elements = visible.flatten_all()?.to_vec1()?;
            Ok((elements, [batch, heads, queries, keys]))
        };
        let of_bias = masks.bias.iter().map(|bias| bias.ne(f32::NEG_INFINITY));
        let visible = masks.visible.iter().map(|visible| Ok(visible.clone()));
        let visible = visible.chain(of_bias);
        Ok(Self {
            sizes: *sizes,
            first_keys: match &config.first_keys {
                Some(first_keys) => first_keys.to_host()?,
                None => Vec::new(),
            },
            visible: visible
                .map(|visible| to_host(&visible?))
                .collect::<Result<_>>()?,
        })
    }

    /// Returns whether all sequences and heads see the same.
    pub(super) fn is_shared(&self) -> bool {
        let mut masks = self.visible.iter();
        self.first_keys.is_empty() && masks.all(|(_, dims)| dims[..2] == [1, 1])
    }

    /// Returns whether a query of a head of a sequence attends to a key.
    pub(super) fn sees(&self, [batch, head]: [usize; 2], query: usize, key: usize) -> bool {
        let ranges = self.sizes.key_ranges(&self.first_keys, batch);
        let mut masks = self.visible.iter();
        ranges.of_query(query).contains(&key)
            && masks.all(|(visible, dims)| {
                let visible = PerScore::new(visible, *dims).of(batch, head);
                visible.at(query, key) != 0
            })
    }

    /// Returns 1 where a query attends to a key, else 0: u8 (B, H, Tq, Tk), or (Tq, Tk) if [shared](Self::is_shared).
    pub(super) fn tensor(&self, device: &Device) -> Result<Tensor> {
        let Sizes {
            batch,
            heads,
            queries,
            keys,
            ..
        } = self.sizes;
        let (batches, heads) = match self.is_shared() {
            true => (1, 1),
            false => (batch, heads),
        };
        let mut seen = Vec::with_capacity(batches * heads * queries * keys);
        for matrix in 0..batches * heads {
            let head = [matrix / heads, matrix % heads];
            for query in 0..queries {
                seen.extend((0..keys).map(|key| u8::from(self.sees(head, query, key))));
            }
        }
        let seen = Tensor::from_vec(seen, (batches, heads, queries, keys), device)?;
        match self.is_shared() {
            true => seen.reshape((queries, keys)),
            false => Ok(seen),
        }
    }
}
