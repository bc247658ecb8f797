//! Host memory on Linux: what the machine has, what the control groups that this process is in leave of it, and the
//! process's own limits. All of it is read from files under a root folder, `/` but in tests.

mod control_groups;
#[cfg(test)]
mod tests;

use std::fs;
use std::path::Path;

/// Bytes in all, and those of them that can still be allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Room {
    pub total_bytes: u64,
    pub available_bytes: u64,
}

impl Room {
    /// Under a limit of which some is used.
    fn under(limit_bytes: u64, used_bytes: u64) -> Self {
        Self {
            total_bytes: limit_bytes,
            available_bytes: limit_bytes.saturating_sub(used_bytes),
        }
    }

    /// Under both.
    fn least(self, other: Self) -> Self {
        Self {
            total_bytes: self.total_bytes.min(other.total_bytes),
            available_bytes: self.available_bytes.min(other.available_bytes),
        }
    }
}

/// The least of the machine, of every control group from this process's own to the root, and of the process's limits.
/// `None` if the machine's memory cannot be read.
pub(super) fn room(root: &Path) -> Option<Room> {
    let limits = control_groups::rooms(root).into_iter();
    let limits = limits.chain(of_process(root));
    Some(limits.fold(of_machine(root)?, Room::least))
}

fn of_machine(root: &Path) -> Option<Room> {
    let meminfo = read(root, "proc/meminfo")?;
    let total_bytes = kibibytes(&meminfo, "MemTotal:")?;
    let available = kibibytes(&meminfo, "MemAvailable:"); // since Linux 3.14
    let available = available.or_else(|| kibibytes(&meminfo, "MemFree:"))?;
    Some(Room {
        total_bytes,
        available_bytes: available.min(total_bytes),
    })
}

/// `ulimit -v` and `ulimit -d`: of all addresses, and of those of private memory that can be written.
fn of_process(root: &Path) -> Vec<Room> {
    let (Some(limits), Some(status)) = (
        read(root, "proc/self/limits"),
        read(root, "proc/self/status"),
    ) else {
        return Vec::new();
    };
    let pairs = [
        ("Max address space", "VmSize:"),
        ("Max data size", "VmData:"),
    ];
    let rooms = pairs.into_iter().filter_map(|(limit, used)| {
        let soft = limits.lines().find_map(|line| line.strip_prefix(limit))?;
        let soft = soft.split_whitespace().next()?.parse().ok()?; // not if it is "unlimited"
        Some(Room::under(soft, kibibytes(&status, used)?))
    });
    rooms.collect()
}

/// The bytes of a line such as `MemTotal:  24684084 kB`.
fn kibibytes(text: &str, key: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(key))?;
    let kib: u64 = value.split_whitespace().next()?.parse().ok()?;
    Some(kib.saturating_mul(1024))
}

fn read(root: &Path, path: &str) -> Option<String> {
    fs::read_to_string(root.join(path)).ok()
}
