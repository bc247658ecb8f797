//! What saved tensors may be, for errors: their numbers, their types and shapes.

use crate::Result;
use crate::inplace::{for_stored, is_supported, read};
use candle_core::{Tensor, WithDType};
use rayon::prelude::*;

/// Elements that one task looks at.
const CHUNK: usize = 1 << 15;

pub(crate) fn describe(tensor: &Tensor) -> String {
    format!("{} {:?}", tensor.dtype().as_str(), tensor.dims())
}

/// What the elements of a saved tensor may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Numbers {
    /// Whatever there is.
    Any,
    /// Neither infinite nor NaN.
    Finite,
    /// Finite, and none under 0.
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

    /// The first element that may not be, with its place, as errors say it.
    ///
    /// # Errors
    /// candle's where a tensor cannot be brought to the host.
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
            // Without an early exit it is one vectorised pass; the search runs only where it will find something.
            let any = chunk.iter().fold(false, |any, x| any | wrong(x));
            let position = any.then(|| chunk.iter().position(wrong)).flatten()?;
            let value = chunk[position].to_f64();
            Some(format!("{value} at element {}", i * CHUNK + position))
        })
    }
}
