//! Activations by name.

/// A function of one element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// tanh(x).
    Tanh,
    /// 1 / (1 + exp(-x)).
    Sigmoid,
    /// x sigmoid(x).
    Silu,
    /// x times the standard normal distribution's share below x.
    Gelu,
    /// x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3): GELU by the tanh of u.
    GeluTanh,
}

/// The function of a gate's elements, f in `f(gate) * up`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// [`Activation::Silu`]: SwiGLU.
    Silu,
    /// [`Activation::Gelu`]: GeGLU.
    Gelu,
    /// [`Activation::GeluTanh`]: GeGLU by tanh.
    GeluTanh,
}
