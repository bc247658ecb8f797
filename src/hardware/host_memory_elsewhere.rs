//! Host memory on systems other than Linux: total and available, as the system reports them.

use std::path::Path;

/// Total bytes, and the bytes of them that can still be allocated.
pub(super) struct HostMemory {
    pub total_bytes: u64,
    pub available_bytes: u64,
}

/// Returns the machine's memory; `None` if the system does not report it.
pub(super) fn host_memory(_root: &Path) -> Option<HostMemory> {
    let mut system = sysinfo::System::new().ok()?;
    system.refresh_memory();
    let total_bytes = Some(system.total_memory()).filter(|bytes| *bytes > 0)?;
    Some(HostMemory {
        total_bytes,
        available_bytes: system.available_memory(),
    })
}
