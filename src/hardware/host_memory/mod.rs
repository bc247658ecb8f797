//! Host memory on Linux: the machine's, limited by control groups and by the process's own limits. All of it is read
//! from files under a root folder: `/`, or another one in tests.

#[cfg(test)]
mod tests;

use std::fs;
use std::path::{Path, PathBuf};

/// Total bytes, and the bytes of them that can still be allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HostMemory {
    pub total_bytes: u64,
    pub available_bytes: u64,
}

impl HostMemory {
    /// Returns what a limit leaves of which some is used.
    fn under(limit_bytes: u64, used_bytes: u64) -> Self {
        Self {
            total_bytes: limit_bytes,
            available_bytes: limit_bytes.saturating_sub(used_bytes),
        }
    }

    /// Returns the minimum of both.
    fn least(self, other: Self) -> Self {
        Self {
            total_bytes: self.total_bytes.min(other.total_bytes),
            available_bytes: self.available_bytes.min(other.available_bytes),
        }
    }
}

/// Returns the minimum of the machine, of every control group from this process's to the root, and of the process's
/// limits. `None` if the machine's memory cannot be read.
pub(super) fn host_memory(root: &Path) -> Option<HostMemory> {
    let limits = group_limits(root).into_iter();
    let limits = limits.chain(of_process(root));
    Some(limits.fold(of_machine(root)?, HostMemory::least))
}

fn of_machine(root: &Path) -> Option<HostMemory> {
    let meminfo = read(root, "proc/meminfo")?;
    let total_bytes = kibibytes(&meminfo, "MemTotal:")?;
    let available = kibibytes(&meminfo, "MemAvailable:"); // since Linux 3.14
    let available = available.or_else(|| kibibytes(&meminfo, "MemFree:"))?;
    Some(HostMemory {
        total_bytes,
        available_bytes: available.min(total_bytes),
    })
}

/// Returns what `ulimit -v` (all addresses) and `ulimit -d` (private writable memory) leave.
fn of_process(root: &Path) -> Vec<HostMemory> {
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
    let limits = pairs.into_iter().filter_map(|(limit, used)| {
        let soft = limits.lines().find_map(|line| line.strip_prefix(limit))?;
        let soft = soft.split_whitespace().next()?.parse().ok()?; // `None` for "unlimited"
        Some(HostMemory::under(soft, kibibytes(&status, used)?))
    });
    limits.collect()
}

/// Parses the bytes of a line such as `MemTotal:  24684084 kB`.
fn kibibytes(text: &str, key: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(key))?;
    let kib: u64 = value.split_whitespace().next()?.parse().ok()?;
    Some(kib.saturating_mul(1024))
}

fn read(root: &Path, path: &str) -> Option<String> {
    fs::read_to_string(root.join(path)).ok()
}

/// The mount point of a version of control groups, and the files of a group.
struct Version {
    mount_point: &'static str,
    limits: &'static [&'static str],
    used: &'static str,
    /// The page cache's entries in `memory.stat`, which count as used.
    caches: [&'static str; 2],
}

const ONE: Version = Version {
    mount_point: "sys/fs/cgroup/memory",
    limits: &["memory.limit_in_bytes"],
    used: "memory.usage_in_bytes",
    caches: ["total_inactive_file", "total_active_file"],
};

const TWO: Version = Version {
    mount_point: "sys/fs/cgroup",
    // Above `memory.high` a process is not killed, but slowed down until it hardly runs.
    limits: &["memory.max", "memory.high"],
    used: "memory.current",
    caches: ["inactive_file", "active_file"],
};

/// Returns what each limited group leaves, from this process's own group to the root, in both versions: a system may
/// have both, with memory in one of them.
fn group_limits(root: &Path) -> Vec<HostMemory> {
    let groups = read(root, "proc/self/cgroup").unwrap_or_default();
    let of_memory = groups.lines().filter_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, group) = (parts.next()?, parts.next()?);
        let is_of_memory = controllers.split(',').any(|name| name == "memory");
        match controllers {
            "" => Some((TWO, group)),
            _ => is_of_memory.then_some((ONE, group)),
        }
    });
    let limits = of_memory.flat_map(|(version, group)| {
        let levels = levels(&root.join(version.mount_point), group);
        let limits = levels
            .into_iter()
            .map(move |folder| version.host_memory(&folder));
        limits.flatten()
    });
    limits.collect()
}

impl Version {
    /// Returns what a group's limits leave; `None` without limits. The page cache counts as free: the system drops it
    /// before it refuses memory.
    fn host_memory(&self, folder: &Path) -> Option<HostMemory> {
        let number = |name: &str| read(folder, name)?.trim().parse::<u64>().ok();
        let limit = self.limits.iter().filter_map(|name| number(name)).min()?;
        let stat = read(folder, "memory.stat").unwrap_or_default();
        let lines = stat.lines().filter_map(|line| line.split_once(' '));
        let caches = lines.filter(|(key, _)| self.caches.contains(key));
        let cache = caches.filter_map(|(_, bytes)| bytes.trim().parse::<u64>().ok());
        let used = number(self.used).unwrap_or_default();
        Some(HostMemory::under(limit, used.saturating_sub(cache.sum())))
    }
}

/// Returns the folders of a group and of all its ancestors.
///
/// A container may see its group by the host's path, while its mount shows only the end of that path, or nothing of it.
/// Then only the mounted group is known: usually the container's own, else an ancestor.
fn levels(mount_point: &Path, group: &str) -> Vec<PathBuf> {
    let names: Vec<&str> = group.split('/').filter(|name| !name.is_empty()).collect();
    let is_outside = names.contains(&"..");
    let ends = (0..=names.len()).map(|skipped| names[skipped..].iter().collect::<PathBuf>());
    let mut ends = ends.skip(if is_outside { names.len() } else { 0 });
    let below = ends.find(|end| mount_point.join(end).is_dir());
    let below = below.unwrap_or_default();
    let levels = below.ancestors().map(|level| mount_point.join(level));
    levels.collect()
}
