//! Elementwise activations and gates.

/// An elementwise activation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// tanh(x).
    Tanh,
    /// 1 / (1 + exp(-x)).
    Sigmoid,
    /// log(sigmoid(x)).
    LogSigmoid,
    /// x sigmoid(x).
    Silu,
    /// `x Phi(x)`, where Phi is the standard normal distribution function.
    Gelu,
    /// `x sigmoid(2 u)` with `u = sqrt(2 / pi) (x + 0.044715 x^3)`: the tanh approximation of GELU.
    GeluTanh,
}

/// The activation f of a gated layer, `f(gate) * up`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// [`Activation::Silu`]: SwiGLU.
    Silu,
    /// [`Activation::Gelu`]: GeGLU.
    Gelu,
    /// [`Activation::GeluTanh`]: GeGLU with the tanh approximation.
    GeluTanh,
}
