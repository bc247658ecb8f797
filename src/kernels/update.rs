//! The coefficients of an update.

use super::cpu::update::{AdamW, COEFFICIENTS, Lion, Muon, Sgd};

/// The coefficients of a step, the same for all elements of a parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Update {
    /// The key of the stochastic rounding of bf16 moments, which depends on the parameter and the step.
    pub rounding: u32, // first: with bf16 moments all updates differ in it, so `==` stops here
    /// The bound of gradients: each element is clamped to `[-clip_value, clip_value]`. Infinity does not clip.
    pub clip_value: f64,
    /// The coefficients of the rule.
    pub rule: Coefficients,
}

/// Defines the enum of the rules' coefficients.
macro_rules! rules {
    ($($Rule:ident),+) => {
        /// The coefficients of a rule in a step.
        #[derive(Clone, Copy, Debug, PartialEq)]
        pub enum Coefficients {
            $(#[doc = concat!("Those of [`", stringify!($Rule), "`].")] $Rule($Rule),)+
        }

        impl Coefficients {
            /// Returns the name of the rule's kernel on a GPU.
            pub fn kernel(&self) -> &'static str {
                match self {
                    $(Self::$Rule(rule) => rule.kernel(),)+
                }
            }

            /// Returns the coefficients in the order of the rule's kernels; the rest is 0.
            pub fn words(&self) -> [f64; COEFFICIENTS] {
                match self {
                    $(Self::$Rule(rule) => rule.words(),)+
                }
            }
        }

        $(
            /// An update without clipping, with moments that are not rounded.
            impl From<$Rule> for Update {
                fn from(rule: $Rule) -> Self {
                    let (rounding, clip_value) = (0, f64::INFINITY);
                    Self { rounding, clip_value, rule: Coefficients::$Rule(rule) }
                }
            }
        )+
    };
}
rules!(AdamW, Lion, Muon, Sgd);
