//! Detection and choice of the processor's bf16 matmul instructions.

#[cfg(test)]
use super::emulated::Emulated;
#[cfg(target_arch = "aarch64")]
use super::neon;
use super::tile::{Factors, Tiles};
#[cfg(target_arch = "x86_64")]
use super::{
    amx::{self, Registers},
    avx512,
};
use crate::kernels::cpu::half_arithmetic::{HalfArithmetic, half_arithmetic};
use half::bf16;
use std::any::TypeId;
use std::sync::OnceLock;

/// A set of instructions that multiplies bf16 matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    /// AMX-BF16, with the system's permission.
    #[cfg(target_arch = "x86_64")]
    Amx,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// AArch64's bf16 instructions.
    #[cfg(target_arch = "aarch64")]
    Neon,
    #[cfg(test)]
    Emulated(Emulated),
}

/// Returns the unit that bf16 matmuls run on, detected once; `None` if they are widened to f32.
///
/// AMX-BF16 is used wherever it is permitted. AVX512-BF16 is used on AMD processors, where it has twice the rate of
/// f32, but not on Intel's, where it does not reach that rate. The choice goes by vendor and is not measured, because
/// it decides about bits, and every run on a machine must have the same. AArch64's instructions are used only on
/// request: their speed has not been measured. [`bf16_matmul_unit`](crate::hardware::bf16_matmul_unit) describes how to
/// choose another.
pub(crate) fn unit() -> Option<Unit> {
    static UNIT: OnceLock<Option<Unit>> = OnceLock::new();
    *UNIT.get_or_init(|| named_or(Unit::is_faster))
}

/// Returns the unit that multiplies f32 tiles as sums of two terms, for attention on `T` with heads of `head_dim`
/// elements; `None` if tiles are multiplied in f32.
///
/// It is AMX for bf16 and heads of [`WIDE`] elements and more: for narrower heads, packing costs more than it saves. On
/// other units two terms are no faster than f32. A unit that the environment variable names is used for any width.
pub(crate) fn unit_of_tiles<T: 'static>(head_dim: usize) -> Option<Unit> {
    /// The unit, and the narrowest heads that use it.
    static UNIT: OnceLock<(Option<Unit>, usize)> = OnceLock::new();
    if TypeId::of::<T>() != TypeId::of::<bf16>() {
        return None;
    }
    let (unit, narrowest) = *UNIT.get_or_init(|| {
        let is_named = std::env::var_os(UNIT_VARIABLE).is_some();
        let unit = named_or(Unit::is_fast_in_two_terms);
        (unit, if is_named { 0 } else { WIDE })
    });
    unit.filter(|_| head_dim >= narrowest)
}

/// The narrowest heads whose attention is faster with AMX. Measured time relative to f32: 1.1 for 32 elements, 0.86 for
/// 64, 0.81 for 128 (Sapphire Rapids).
const WIDE: usize = 64;

/// Returns the unit that [`UNIT_VARIABLE`] names, if this processor has it; without the variable, the first that is
/// `chosen`.
fn named_or(chosen: impl Fn(&Unit) -> bool) -> Option<Unit> {
    let mut there = available().into_iter();
    match std::env::var(UNIT_VARIABLE).ok().as_deref() {
        None => there.find(chosen),
        Some(name) => {
            there.find(|unit| unit.name().is_some_and(|it| it.eq_ignore_ascii_case(name)))
        }
    }
}

/// The environment variable that names a unit.
const UNIT_VARIABLE: &str = "TALLOW_BF16_MATMUL";

/// Returns the units that this processor has and the system permits, the fastest first.
pub(super) fn available() -> Vec<Unit> {
    #[cfg(target_arch = "x86_64")]
    if std::is_x86_feature_detected!("avx512bw") && std::is_x86_feature_detected!("avx512vl") {
        let has = half_arithmetic();
        let amx = has.contains(&HalfArithmetic::AmxBf16) && is_granted();
        let avx512 = has.contains(&HalfArithmetic::Avx512Bf16);
        // AMX also needs AVX512-BF16, which rounds the sums of its tiles.
        let units = [(amx && avx512, Unit::Amx), (avx512, Unit::Avx512)];
        return units
            .into_iter()
            .filter_map(|(is_there, unit)| is_there.then_some(unit))
            .collect();
    }
    #[cfg(target_arch = "aarch64")]
    if half_arithmetic().contains(&HalfArithmetic::NeonBf16) {
        return vec![Unit::Neon];
    }
    Vec::new()
}

/// Asks the system to save tile registers in the state of this process's threads.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn is_granted() -> bool {
    const REQUEST_PERMISSION: libc::c_long = 0x1023;
    const TILE_DATA: libc::c_long = 18;
    // SAFETY: the request changes a permission of this process, not its memory.
    unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0 }
}

/// Tiles are used only on Linux.
#[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
fn is_granted() -> bool {
    false
}

impl Unit {
    /// Returns the unit's public name.
    pub fn arithmetic(self) -> Option<HalfArithmetic> {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Amx => Some(HalfArithmetic::AmxBf16),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => Some(HalfArithmetic::Avx512Bf16),
            #[cfg(target_arch = "aarch64")]
            Self::Neon => Some(HalfArithmetic::NeonBf16),
            #[cfg(test)]
            Self::Emulated(_) => None,
        }
    }

    /// Prepares this thread for multiplying, until the session is dropped.
    pub(super) fn start(self) -> Session {
        Session {
            unit: self,
            #[cfg(target_arch = "x86_64")]
            // SAFETY: this unit exists only with permission; kernels do not nest.
            _registers: (self == Self::Amx).then(|| unsafe { Registers::new() }),
        }
    }

    fn name(self) -> Option<&'static str> {
        Some(self.arithmetic()?.name())
    }

    /// Returns whether the unit is faster than f32 even with two terms.
    fn is_fast_in_two_terms(&self) -> bool {
        self.arithmetic() == Some(HalfArithmetic::AmxBf16)
    }

    /// Returns whether the unit is faster than widening to f32.
    fn is_faster(&self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Amx => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => is_amd(),
            #[cfg(target_arch = "aarch64")]
            Self::Neon => false, // not measured
            #[cfg(test)]
            Self::Emulated(_) => false,
        }
    }
}

pub(super) struct Session {
    unit: Unit,
    #[cfg(target_arch = "x86_64")]
    _registers: Option<Registers>,
}

impl Session {
    /// Computes `sums = a b`, or `sums += a b` if `adds`, for a block of `tiles`: sums as tiles (2, 2).
    ///
    /// # Safety
    /// The factors must be readable for their steps, of which there is at least one, and the sums writable.
    #[inline]
    pub unsafe fn multiply(&self, factors: Factors, tiles: Tiles, sums: *mut f32, adds: bool) {
        // SAFETY: the caller's promise; the processor has the unit, and it is ready.
        unsafe {
            match self.unit {
                #[cfg(target_arch = "x86_64")]
                Unit::Amx => amx::multiply(factors, tiles, sums, adds),
                #[cfg(target_arch = "x86_64")]
                Unit::Avx512 => avx512::multiply(factors, tiles, sums, adds),
                #[cfg(target_arch = "aarch64")]
                Unit::Neon => neon::multiply(factors, tiles, sums, adds),
                #[cfg(test)]
                Unit::Emulated(emulated) => emulated.multiply(factors, tiles, sums, adds),
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn is_amd() -> bool {
    use std::arch::x86_64::__cpuid;
    // A safe function in newer compilers, unsafe in older ones.
    #[allow(unused_unsafe)]
    // SAFETY: every x86-64 processor has the instruction.
    let leaf = unsafe { __cpuid(0) };
    let name = [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes);
    name.as_flattened() == b"AuthenticAMD"
}
