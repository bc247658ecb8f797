//! Host memory where the system is not Linux: what it calls total and available.

use std::path::Path;

/// Bytes in all, and those of them that can still be allocated.
pub(super) struct Room {
    pub total_bytes: u64,
    pub available_bytes: u64,
}

/// `None` if the system does not say.
pub(super) fn room(_root: &Path) -> Option<Room> {
    let mut system = sysinfo::System::new().ok()?;
    system.refresh_memory();
    let total_bytes = Some(system.total_memory()).filter(|bytes| *bytes > 0)?;
    Some(Room {
        total_bytes,
        available_bytes: system.available_memory(),
    })
}
