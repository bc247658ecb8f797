//! A call's operands as slices.
//!
//! The plan says that what a call writes is no other operand of it, and that nothing else uses the memory of a buffer
//! that is alive; a call runs alone. That is what [`View`]'s slices want.

use super::super::op::Accumulate;
use super::super::plan::Call;
use super::memory::View;
use crate::kernels::cpu::Stored;
use crate::kernels::cpu::attention::rotary_heads::Angles;
use candle_core::{DType, WithDType};
use std::marker::PhantomData;

/// A call's operands, by the op's names. Each is f32, or in the one other dtype that the call has: `S`,
/// which may be f32 too; the exponentials of attention alone have a dtype of their own. Asking for another than the
/// buffer's is a bug of the plan's, and panics.
pub(super) struct Operands<'a, S> {
    pub call: &'a Call,
    view: &'a View<'a>,
    lower: PhantomData<S>,
}

impl<'a, S: Stored<Wide = f32>> Operands<'a, S> {
    pub fn new(call: &'a Call, view: &'a View<'a>) -> Self {
        Self {
            call,
            view,
            lower: PhantomData,
        }
    }

    pub fn read<T: WithDType>(&self, name: &str) -> &'a [T] {
        // SAFETY: see above.
        unsafe { self.view.read(&self.call.reads[name]) }
    }

    /// Once for each name.
    pub fn write<T: WithDType>(&self, name: &str) -> &'a mut [T] {
        // SAFETY: see above; each caller asks once for each name.
        unsafe { self.view.write(&self.call.writes[name]) }
    }

    /// What is read in f32.
    pub fn x(&self, name: &str) -> &'a [f32] {
        self.read(name)
    }

    /// What is written in f32.
    pub fn y(&self, name: &str) -> &'a mut [f32] {
        self.write(name)
    }

    /// What is read in the lower dtype.
    pub fn lower_x(&self, name: &str) -> &'a [S] {
        self.read(name)
    }

    /// What is written in the lower dtype.
    pub fn lower_y(&self, name: &str) -> &'a mut [S] {
        self.write(name)
    }

    /// Of what is written.
    pub fn dtype(&self, name: &str) -> DType {
        self.view.dtype(&self.call.writes[name])
    }

    /// Of what is read.
    pub fn dtype_read(&self, name: &str) -> DType {
        self.view.dtype(&self.call.reads[name])
    }

    /// Whether the call reads it.
    pub fn reads(&self, name: &str) -> bool {
        self.call.reads.get(name).is_some()
    }

    /// Whether the call writes it.
    pub fn writes(&self, name: &str) -> bool {
        self.call.writes.get(name).is_some()
    }

    pub fn angles(&self) -> Angles<'a, f32> {
        Angles {
            cos: self.x("cos"),
            sin: self.x("sin"),
        }
    }

    pub fn adds(&self, accumulate: Accumulate) -> bool {
        accumulate.adds(self.view.micro_batch())
    }
}
