//! Blocks of c by AMX tiles.
//!
//! `tdpbf16ps` works on whole tiles: for 16 x 16 elements of c and 32 elements of the depth, it runs two chains of 16
//! fused multiply-adds from zero, over the even and the odd elements. The two are added, then their sum is added to c.

use super::tile::{Factors, Tiles};
use std::arch::asm;

/// The operand of `ldtilecfg`: eight registers of 16 rows by 64 bytes.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

static CONFIG: Config = Config {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};

/// Guard: tile registers are configured on this thread until it is dropped.
pub(super) struct Registers(());

impl Registers {
    /// # Safety
    /// The processor must have AMX-BF16, the system must let this process use it, and this thread must have no other
    /// [`Registers`].
    pub unsafe fn new() -> Self {
        // SAFETY: the caller's promise; the configuration is a valid one.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const CONFIG,
                options(nostack, readonly, preserves_flags));
        }
        Self(())
    }
}

impl Drop for Registers {
    fn drop(&mut self) {
        // SAFETY: there are registers to release. Context switches are cheaper for a thread whose registers are
        // released.
        unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) };
    }
}

/// The loop over the depth: `$load` or `$clear`, `$step` for every 32 elements of the depth, `$store`.
macro_rules! over_depth {
    ($factors:expr, $sums:expr, $adds:expr, $load:literal, $clear:literal, $step:literal, $store:literal) => {
        asm!(
            "test {adds}, {adds}",
            "jz 2f",
            $load,
            "jmp 3f",
            "2:",
            $clear,
            "3:",
            $step,
            "add {a0}, 1024",
            "add {a1}, 1024",
            "add {b0}, 1024",
            "add {b1}, 1024",
            "dec {steps}",
            "jnz 3b",
            $store,
            adds = in(reg) usize::from($adds),
            a0 = inout(reg) $factors.a => _,
            a1 = inout(reg) $factors.a.wrapping_add($factors.a_panel) => _,
            b0 = inout(reg) $factors.b => _,
            b1 = inout(reg) $factors.b.wrapping_add($factors.b_panel) => _,
            c = in(reg) $sums,
            line = in(reg) 64usize,
            steps = inout(reg) $factors.steps => _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        )
    };
}

/// Computes `sums = a b`, or `sums += a b` if `adds`, for a block of `tiles`.
///
/// # Safety
/// This thread must have [`Registers`]; the factors must be readable for their steps, of which there is at least one,
/// and the sums writable.
pub(super) unsafe fn multiply(factors: Factors, tiles: Tiles, sums: *mut f32, adds: bool) {
    // SAFETY: the caller's promise.
    unsafe {
        match (tiles.rows, tiles.columns) {
            (1, 1) => over_depth!(
                factors,
                sums,
                adds,
                "tileloadd tmm0, [{c} + {line}]",
                "tilezero tmm0",
                "tileloadd tmm4, [{a0} + {line}]
                 tileloadd tmm6, [{b0} + {line}]
                 tdpbf16ps tmm0, tmm4, tmm6",
                "tilestored [{c} + {line}], tmm0"
            ),
            (1, _) => over_depth!(
                factors,
                sums,
                adds,
                "tileloadd tmm0, [{c} + {line}]
                 tileloadd tmm1, [{c} + {line} + 1024]",
                "tilezero tmm0
                 tilezero tmm1",
                "tileloadd tmm4, [{a0} + {line}]
                 tileloadd tmm6, [{b0} + {line}]
                 tileloadd tmm7, [{b1} + {line}]
                 tdpbf16ps tmm0, tmm4, tmm6
                 tdpbf16ps tmm1, tmm4, tmm7",
                "tilestored [{c} + {line}], tmm0
                 tilestored [{c} + {line} + 1024], tmm1"
            ),
            (_, 1) => over_depth!(
                factors,
                sums,
                adds,
                "tileloadd tmm0, [{c} + {line}]
                 tileloadd tmm2, [{c} + {line} + 2048]",
                "tilezero tmm0
                 tilezero tmm2",
                "tileloadd tmm4, [{a0} + {line}]
                 tileloadd tmm6, [{b0} + {line}]
                 tileloadd tmm5, [{a1} + {line}]
                 tdpbf16ps tmm0, tmm4, tmm6
                 tdpbf16ps tmm2, tmm5, tmm6",
                "tilestored [{c} + {line}], tmm0
                 tilestored [{c} + {line} + 2048], tmm2"
            ),
            _ => over_depth!(
                factors,
                sums,
                adds,
                "tileloadd tmm0, [{c} + {line}]
                 tileloadd tmm1, [{c} + {line} + 1024]
                 tileloadd tmm2, [{c} + {line} + 2048]
                 tileloadd tmm3, [{c} + {line} + 3072]",
                "tilezero tmm0
                 tilezero tmm1
                 tilezero tmm2
                 tilezero tmm3",
                "tileloadd tmm4, [{a0} + {line}]
                 tileloadd tmm6, [{b0} + {line}]
                 tileloadd tmm5, [{a1} + {line}]
                 tdpbf16ps tmm0, tmm4, tmm6
                 tileloadd tmm7, [{b1} + {line}]
                 tdpbf16ps tmm1, tmm4, tmm7
                 tdpbf16ps tmm2, tmm5, tmm6
                 tdpbf16ps tmm3, tmm5, tmm7",
                "tilestored [{c} + {line}], tmm0
                 tilestored [{c} + {line} + 1024], tmm1
                 tilestored [{c} + {line} + 2048], tmm2
                 tilestored [{c} + {line} + 3072], tmm3"
            ),
        }
    }
}
