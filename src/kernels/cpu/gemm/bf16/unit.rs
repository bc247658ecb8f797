//! Which of the processor's instructions multiply bf16 here.

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

/// What multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    /// AMX-BF16, which the system has granted.
    #[cfg(target_arch = "x86_64")]
    Amx,
    /// AVX512-BF16.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// AArch64's instructions for bf16.
    #[cfg(target_arch = "aarch64")]
    Neon,
    /// Plain code.
    #[cfg(test)]
    Emulated(Emulated),
}

/// The unit that products of bf16 run on, found once; `None` where they are widened to f32.
///
/// AMX-BF16 wherever it is granted. AVX512-BF16 on processors of AMD, where it multiplies at twice f32's rate, and not
/// on Intel's, where it does not: by the maker and not by measuring, for the choice decides about bits, and these shall
/// be the same in every run on a machine. AArch64's only where it is asked for: its speed has not been measured.
/// [`bf16_products`](crate::hardware::bf16_products) says how to choose another.
pub(crate) fn unit() -> Option<Unit> {
    static UNIT: OnceLock<Option<Unit>> = OnceLock::new();
    *UNIT.get_or_init(|| wanted_or(Unit::is_faster))
}

/// The unit that tiles in f32 which were made of `T`s are multiplied by, as sums of two terms: attention's, where `T`
/// is bf16 and heads are `head_dim` wide.
///
/// AMX for heads of [`WIDE`] elements and more: packing takes longer than it saves for narrower ones. `None` where
/// tiles are multiplied in f32, which is as fast as two terms are on other units. A unit that the variable names is
/// taken for any.
pub(crate) fn unit_of_tiles<T: 'static>(head_dim: usize) -> Option<Unit> {
    /// The unit, and the narrowest heads that it is for.
    static UNIT: OnceLock<(Option<Unit>, usize)> = OnceLock::new();
    if TypeId::of::<T>() != TypeId::of::<bf16>() {
        return None;
    }
    let (unit, narrowest) = *UNIT.get_or_init(|| {
        let is_named = std::env::var_os(WANTED).is_some();
        let unit = wanted_or(Unit::is_fast_in_two_terms);
        (unit, if is_named { 0 } else { WIDE })
    });
    unit.filter(|_| head_dim >= narrowest)
}

/// The narrowest heads whose attention gained by AMX where it was measured: of 32 it took 1.1 times as long as in f32,
/// of 64 0.86, of 128 0.81 (Sapphire Rapids).
const WIDE: usize = 64;

/// The unit that [`WANTED`] names if it is there, or the first that is `chosen`.
fn wanted_or(chosen: impl Fn(&Unit) -> bool) -> Option<Unit> {
    let mut there = there().into_iter();
    match std::env::var(WANTED).ok().as_deref() {
        None => there.find(chosen),
        Some(name) => {
            there.find(|unit| unit.name().is_some_and(|it| it.eq_ignore_ascii_case(name)))
        }
    }
}

/// Names the unit in place of the rule.
const WANTED: &str = "TALLOW_BF16_PRODUCTS";

/// The units that are there, those that are granted, the fastest first.
pub(super) fn there() -> Vec<Unit> {
    #[cfg(target_arch = "x86_64")]
    if std::is_x86_feature_detected!("avx512bw") && std::is_x86_feature_detected!("avx512vl") {
        let has = half_arithmetic();
        let amx = has.contains(&HalfArithmetic::AmxBf16) && is_granted();
        let avx512 = has.contains(&HalfArithmetic::Avx512Bf16);
        // Tiles come with the other: it rounds what they sum.
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

/// Asks the system to keep the tiles in the state of this process's threads.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn is_granted() -> bool {
    const REQUEST_PERMISSION: libc::c_long = 0x1023;
    const TILE_DATA: libc::c_long = 18;
    // SAFETY: a request that changes what this process may do, and none of its memory.
    unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0 }
}

/// Tiles are used on Linux alone.
#[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
fn is_granted() -> bool {
    false
}

impl Unit {
    /// The unit by the name that users know.
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

    /// What it takes to multiply on this thread, until that is dropped.
    pub(super) fn start(self) -> Session {
        Session {
            unit: self,
            #[cfg(target_arch = "x86_64")]
            // SAFETY: this unit is there only where it is granted; kernels do not call each other.
            _registers: (self == Self::Amx).then(|| unsafe { Registers::new() }),
        }
    }

    fn name(self) -> Option<&'static str> {
        Some(self.arithmetic()?.name())
    }

    /// Whether it is faster than f32 with twice the terms.
    fn is_fast_in_two_terms(&self) -> bool {
        self.arithmetic() == Some(HalfArithmetic::AmxBf16)
    }

    /// Whether it is faster than widening.
    fn is_faster(&self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Amx => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => is_amd(),
            #[cfg(target_arch = "aarch64")]
            Self::Neon => false, // not known
            #[cfg(test)]
            Self::Emulated(_) => false,
        }
    }
}

/// A unit that is ready.
pub(super) struct Session {
    unit: Unit,
    #[cfg(target_arch = "x86_64")]
    _registers: Option<Registers>,
}

impl Session {
    /// `sums = a b`, or `sums += a b` where `adds`, of as many tiles as `tiles` says: sums as tiles (2, 2).
    ///
    /// # Safety
    /// The factors are readable for their steps, which are one at least, and the sums writable.
    #[inline]
    pub unsafe fn multiply(&self, factors: Factors, tiles: Tiles, sums: *mut f32, adds: bool) {
        // SAFETY: the caller's promise; the unit is there, and ready.
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
    // A safe function on newer compilers, unsafe on those before.
    #[allow(unused_unsafe)]
    // SAFETY: every x86-64 processor has the instruction.
    let leaf = unsafe { __cpuid(0) };
    let name = [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes);
    name.as_flattened() == b"AuthenticAMD"
}
