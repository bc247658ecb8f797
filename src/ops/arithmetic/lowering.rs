//! Lowering of elementwise arithmetic: broadcast inputs are repeated, and their gradients are summed.

use crate::kernels::cpu::{arithmetic as kernel, reduce};
#[cfg(feature = "cuda")]
use crate::kernels::cuda::{arithmetic, copy, set_to_zero};
use crate::ops::lowering::map;
use crate::ops::lowering::{
    Accumulate, Calls, Kernel, Lowering, Signature, Slot, converted, kernel, on_gpu,
};
use crate::ops::strided;
use candle_core::WithDType;

/// An elementwise kernel of two inputs: reads a and b; writes y.
macro_rules! elementwise {
    ($name:literal, $kernel:path) => {
        map(kernel!($name, |T, _, s| {
            $kernel(s.x::<T>("a")?, s.x("b")?, s.y("y")?);
        }))
    };
}

pub(super) const ADD: Lowering = Lowering {
    forward: |signature| forward(signature, sum()),
    backward: |signature| {
        let mut backward = Backward::new(signature);
        backward.pass_on(0);
        backward.pass_on(1);
        backward.calls
    },
};

pub(super) const ADD_SCALED: Lowering = Lowering {
    forward: |signature| {
        let kernel = kernel!("add_scaled", |T, k, s| {
            kernel::add_scaled(s.x::<T>("a")?, s.x("b")?, k.number("scale")?, s.y("y")?);
        });
        forward(signature, map(kernel).with_all(signature.attributes))
    },
    backward: |signature| {
        let mut backward = Backward::new(signature);
        backward.pass_on(0);
        let dy = backward.dy;
        let kernel = scale().with_all(signature.attributes);
        backward.gradient(1, kernel, [dy, dy]);
        backward.calls
    },
};

pub(super) const SUB: Lowering = Lowering {
    forward: |signature| forward(signature, elementwise!("sub", kernel::sub)),
    backward: |signature| {
        let mut backward = Backward::new(signature);
        backward.pass_on(0);
        let dy = backward.dy;
        backward.gradient(1, elementwise!("neg", kernel::negated), [dy, dy]);
        backward.calls
    },
};

pub(super) const MUL: Lowering = Lowering {
    forward: |signature| forward(signature, mul()),
    backward: |signature| {
        let mut backward = Backward::new(signature);
        let (dy, [a, b]) = (backward.dy, backward.repeated());
        backward.gradient(0, mul(), [dy, b]);
        backward.gradient(1, mul(), [dy, a]);
        backward.calls
    },
};

pub(super) const DIV: Lowering = Lowering {
    forward: |signature| forward(signature, div()),
    backward: |signature| {
        let mut backward = Backward::new(signature);
        let (dy, [a, b]) = (backward.dy, backward.repeated());
        backward.gradient(0, div(), [dy, b]);
        // db = -(dy a / b) / b
        let times = backward.step(mul(), [dy, a]);
        let quotient = backward.step(div(), [times, b]);
        let divided = elementwise!("negated_div", kernel::negated_div);
        backward.gradient(1, divided, [quotient, b]);
        backward.calls
    },
};

/// Reads x; copies it to y, or adds it.
pub(crate) fn accumulated(accumulate: Accumulate) -> Kernel {
    let kernel = kernel!("accumulate", |T, k, s| {
        let x = s.x::<T>("x")?;
        match s.adds(k, "y") {
            false => s.y::<T>("y")?.copy_from_slice(x),
            true => reduce::add_scaled(s.y("y")?, x, 1.0),
        }
    });
    let kernel = on_gpu!(kernel, |k, l| match (l.x("x")?, l.y("y")?) {
        (x, y) if l.adds(k, "y") => arithmetic::add(l.gpu, y, x, y),
        (x, y) => copy(l.gpu, x, y),
    });
    kernel.summing("y", accumulate)
}

pub(crate) fn zeros() -> Kernel {
    let kernel = kernel!("zeros", of "y", |T, _, s| {
        s.y::<T>("y")?.fill(WithDType::from_f64(0.0));
    });
    on_gpu!(kernel, |_, l| set_to_zero(l.gpu, l.y("y")?))
}

/// Applies `kernel` to both inputs, repeated to the output's shape, and rounds if the output's dtype differs.
fn forward(signature: &Signature<'_>, kernel: Kernel) -> Calls {
    let mut calls = Calls::default();
    let [a, b] = [0, 1].map(|input| repeated(&mut calls, signature, input));
    let reads = [("a", a), ("b", b)];
    match is_rounded(signature) {
        false => calls.call(kernel, reads, [("y", Slot::Output)]),
        true => {
            let wide = calls.scratch(signature.output.dims, signature.inputs[0].dtype);
            let calls = calls.call(kernel, reads, [("y", wide)]);
            calls.call(converted(), [("x", wide)], [("y", Slot::Output)])
        }
    }
}

/// Returns whether the output is rounded to a dtype other than the compute dtype.
fn is_rounded(signature: &Signature<'_>) -> bool {
    signature.output.dtype != signature.inputs[0].dtype
}

/// Returns an input repeated to the output's shape.
fn repeated(calls: &mut Calls, signature: &Signature<'_>, input: usize) -> Slot {
    let (x, shape) = (&signature.inputs[input], signature.output.dims);
    if x.dims == shape {
        return Slot::Input(input);
    }
    let copy = calls.scratch(shape, x.dtype);
    let kernel = strided::gather(strided::broadcast(x.dims, shape));
    calls.push(kernel, [("x", Slot::Input(input))], [("y", copy)]);
    copy
}

struct Backward<'a> {
    signature: &'a Signature<'a>,
    calls: Calls,
    /// The output's gradient, in the compute dtype.
    dy: Slot,
}

impl<'a> Backward<'a> {
    fn new(signature: &'a Signature<'a>) -> Self {
        let mut calls = Calls::default();
        let dy = match is_rounded(signature) {
            false => Slot::OutputGradient,
            true => {
                let wide = calls.scratch(signature.output.dims, signature.inputs[0].dtype);
                calls.push(converted(), [("x", Slot::OutputGradient)], [("y", wide)]);
                wide
            }
        };
        Self {
            signature,
            calls,
            dy,
        }
    }

    fn repeated(&mut self) -> [Slot; 2] {
        [0, 1].map(|input| repeated(&mut self.calls, self.signature, input))
    }

    /// Applies `kernel` to two operands of the output's shape; returns the result.
    fn step(&mut self, kernel: Kernel, [a, b]: [Slot; 2]) -> Slot {
        let (shape, dtype) = (self.signature.output.dims, self.signature.inputs[0].dtype);
        let made = self.calls.scratch(shape, dtype);
        self.calls.push(kernel, [("a", a), ("b", b)], [("y", made)]);
        made
    }

    /// Applies `kernel` and makes the result the gradient of an input, summed if that input was repeated.
    fn gradient(&mut self, input: usize, kernel: Kernel, reads: [Slot; 2]) {
        if self.is_repeated(input) {
            let made = self.step(kernel, reads);
            self.sum(input, made);
        } else {
            let ([a, b], y) = (reads, Slot::Gradient(input));
            self.calls.push(kernel, [("a", a), ("b", b)], [("y", y)]);
        }
    }

    /// Makes the output's gradient the gradient of an input.
    fn pass_on(&mut self, input: usize) {
        if self.is_repeated(input) {
            self.sum(input, self.dy);
        } else if is_rounded(self.signature) {
            let (x, y) = (Slot::OutputGradient, Slot::Gradient(input));
            self.calls.push(converted(), [("x", x)], [("y", y)]);
        } else {
            self.calls.aliases.push((input, Slot::OutputGradient));
        }
    }

    fn is_repeated(&self, input: usize) -> bool {
        self.signature.inputs[input].dims != self.signature.output.dims
    }

    fn sum(&mut self, input: usize, gradient: Slot) {
        let (x, shape) = (&self.signature.inputs[input], self.signature.output.dims);
        let kernel = strided::scatter(strided::broadcast(x.dims, shape));
        let (dy, dx) = (gradient, Slot::Gradient(input));
        self.calls.push(kernel, [("dy", dy)], [("dx", dx)]);
    }
}

/// Reads a; writes y = `scale` a, of one dtype.
pub(crate) fn scale() -> Kernel {
    map(kernel!("scale", |T, k, s| {
        kernel::scaled(s.x::<T>("a")?, k.number("scale")?, s.y("y")?);
    }))
}

/// Reads a and b; writes y = a b, of one shape and dtype.
pub(crate) fn mul() -> Kernel {
    elementwise!("mul", kernel::mul)
}

/// Reads a and b; writes y = a / b, of one shape and dtype.
pub(crate) fn div() -> Kernel {
    elementwise!("div", kernel::div)
}

/// Reads a and b; writes y = a + b, of one shape and dtype.
pub(crate) fn sum() -> Kernel {
    let kernel = kernel!("add", |T, _, s| {
        kernel::add(s.x::<T>("a")?, s.x("b")?, s.y("y")?);
    });
    on_gpu!(kernel, |_, l| arithmetic::add(
        l.gpu,
        l.x("a")?,
        l.x("b")?,
        l.y("y")?
    ))
}
