//! Detection of the CPU's half-precision arithmetic.

use candle_core::DType;
use std::fmt;

/// A CPU unit that computes in half precision without widening first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum HalfArithmetic {
    /// Dot products of bf16 pairs, summed in f32.
    Avx512Bf16,
    /// All arithmetic in f16.
    Avx512Fp16,
    /// Matmuls of bf16 tiles, summed in f32.
    AmxBf16,
    /// Matmuls of f16 tiles, summed in f32.
    AmxFp16,
    /// Dot products and small matmuls of bf16, summed in f32.
    NeonBf16,
    /// All arithmetic in f16.
    NeonFp16,
}

impl HalfArithmetic {
    /// Returns the vendor's name of the unit.
    pub fn name(self) -> &'static str {
        match self {
            Self::Avx512Bf16 => "AVX512-BF16",
            Self::Avx512Fp16 => "AVX512-FP16",
            Self::AmxBf16 => "AMX-BF16",
            Self::AmxFp16 => "AMX-FP16",
            Self::NeonBf16 => "NEON BF16",
            Self::NeonFp16 => "NEON FP16",
        }
    }

    /// Returns the dtype that it multiplies.
    pub fn dtype(self) -> DType {
        match self {
            Self::Avx512Bf16 | Self::AmxBf16 | Self::NeonBf16 => DType::BF16,
            Self::Avx512Fp16 | Self::AmxFp16 | Self::NeonFp16 => DType::F16,
        }
    }
}

impl fmt::Display for HalfArithmetic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Returns the half-precision arithmetic that this CPU reports; empty if it has none, and on architectures other than
/// x86-64 and AArch64.
///
/// This crate uses it only for bf16 matmuls; [`bf16_matmul_unit`](crate::hardware::bf16_matmul_unit) reports which
/// unit. All other kernels read and write half precision and compute in f32.
///
/// ```
/// let units = tallow::hardware::half_arithmetic();
/// let names: Vec<&str> = units.iter().map(|unit| unit.name()).collect();
/// println!("{names:?}"); // ["AVX512-BF16"] on a Zen 4
/// ```
pub fn half_arithmetic() -> Vec<HalfArithmetic> {
    detected()
}

/// Returns the units that the CPU has and the system enables.
#[cfg(target_arch = "x86_64")]
fn detected() -> Vec<HalfArithmetic> {
    use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};
    // Safe functions in newer compilers, unsafe in older ones.
    #[allow(unused_unsafe)]
    // SAFETY: every x86-64 processor has the instruction, and a leaf is read only if the CPU reports it.
    let leaf = |leaf: u32, sub: u32| unsafe {
        let known = __cpuid(0).eax >= leaf && (sub == 0 || __cpuid_count(leaf, 0).eax >= sub);
        known.then(|| __cpuid_count(leaf, sub))
    };
    let bit = |word: Option<u32>, bit: u32| word.is_some_and(|word| word >> bit & 1 == 1);
    let edx = leaf(7, 0).map(|registers| registers.edx);
    let eax = leaf(7, 1).map(|registers| registers.eax);
    // Bits 17 and 18: the system saves the tile registers.
    let tiles = std::is_x86_feature_detected!("xsave")
        // SAFETY: the check of `xsave` ensures that the CPU has the instruction and the system enables it.
        && (unsafe { _xgetbv(0) } >> 17 & 3) == 3
        && bit(edx, 24);
    let vectors = std::is_x86_feature_detected!("avx512f");
    let units = [
        (vectors && bit(eax, 5), HalfArithmetic::Avx512Bf16),
        (vectors && bit(edx, 23), HalfArithmetic::Avx512Fp16),
        (tiles && bit(edx, 22), HalfArithmetic::AmxBf16),
        (tiles && bit(eax, 21), HalfArithmetic::AmxFp16),
    ];
    keep_available(&units)
}

/// Returns the units that the CPU has.
#[cfg(target_arch = "aarch64")]
fn detected() -> Vec<HalfArithmetic> {
    keep_available(&[
        (
            std::arch::is_aarch64_feature_detected!("bf16"),
            HalfArithmetic::NeonBf16,
        ),
        (
            std::arch::is_aarch64_feature_detected!("fp16"),
            HalfArithmetic::NeonFp16,
        ),
    ])
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn detected() -> Vec<HalfArithmetic> {
    Vec::new()
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn keep_available(units: &[(bool, HalfArithmetic)]) -> Vec<HalfArithmetic> {
    let there = units.iter().filter(|(there, _)| *there);
    there.map(|(_, unit)| *unit).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares with the Linux kernel's own list of flags.
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    #[test]
    fn the_system_says_the_same() {
        let Ok(info) = std::fs::read_to_string("/proc/cpuinfo") else {
            return;
        };
        let flags = info.lines().find(|line| line.starts_with("flags"));
        let flags: Vec<&str> = flags.unwrap_or_default().split_whitespace().collect();
        let expected = keep_available(&[
            (flags.contains(&"avx512_bf16"), HalfArithmetic::Avx512Bf16),
            (flags.contains(&"avx512_fp16"), HalfArithmetic::Avx512Fp16),
            (flags.contains(&"amx_bf16"), HalfArithmetic::AmxBf16),
            (flags.contains(&"amx_fp16"), HalfArithmetic::AmxFp16),
        ]);
        assert_eq!(half_arithmetic(), expected);
    }
}
