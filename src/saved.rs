//! Validation of the elements of saved tensors.

use crate::Result;
use crate::inplace::{for_stored, is_supported, read};
use candle_core::{Tensor, WithDType};
use rayon::prelude::*;

/// The elements that one task checks.
const CHUNK: usize = 1 << 15;

pub(crate) fn describe(tensor: &Tensor) -> String {
    format!("{} {:?}", tensor.dtype().as_str(), tensor.dims())
}

/// The values that elements of a saved tensor may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Numbers {
    /// Any value.
    Any,
    /// Finite values.
    Finite,
    /// Finite values from 0 on.
    NotNegative,
}

impl Numbers {
    pub(crate) fn expected(self) -> &'static str {
        match self {
            Self::Any => "numbers",
            Self::Finite => "finite numbers",
            Self::NotNegative => "finite numbers from 0",
        }
    }

    /// Describes the first invalid element and its position, for errors.
    ///
    /// # Errors
    /// Errors of candle if the tensor cannot be copied to the host.
    pub(crate) fn misfit(self, tensor: &Tensor) -> Result<Option<String>> {
        if self == Self::Any || !is_supported(tensor.dtype()) {
            return Ok(None);
        }
        let tensor = tensor.detach().to_device(&candle_core::Device::Cpu)?;
        let tensor = tensor.contiguous()?;
        let first = || for_stored!(tensor.dtype(), T => read(&tensor, |elements: &[T]| Ok(self.first(elements))));
        Ok(first()?)
    }

    fn first<T: WithDType>(self, elements: &[T]) -> Option<String> {
        let wrong = |x: &T| {
            let x = x.to_f64();
            !x.is_finite() | (self == Self::NotNegative && x < 0.0)
        };
        let chunks = elements.par_chunks(CHUNK).enumerate();
        chunks.find_map_first(|(i, chunk)| {
            // One vectorized pass without an early exit; the search runs only if there is an invalid element.
            let any = chunk.iter().fold(false, |any, x| any | wrong(x));
            let position = any.then(|| chunk.iter().position(wrong)).flatten()?;
            let value = chunk[position].to_f64();
            Some(format!("{value} at element {}", i * CHUNK + position))
        })
    }
}
