//! The memory limits of control groups, of version 1 and of version 2.

use super::{Room, read};
use std::path::{Path, PathBuf};

/// Where a version of control groups is mounted, and the files of a group.
struct Version {
    mount_point: &'static str,
    limits: &'static [&'static str],
    used: &'static str,
    /// The page cache in what is used, by `memory.stat`.
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
    // Beyond `memory.high` a process is not killed, but slowed down until it hardly runs.
    limits: &["memory.max", "memory.high"],
    used: "memory.current",
    caches: ["inactive_file", "active_file"],
};

/// The room that each limited group leaves, from this process's own to the root, in both versions: a system may have
/// both, with memory in one of them.
pub(super) fn rooms(root: &Path) -> Vec<Room> {
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
    let rooms = of_memory.flat_map(|(version, group)| {
        let levels = levels(&root.join(version.mount_point), group);
        let rooms = levels.into_iter().map(move |folder| version.room(&folder));
        rooms.flatten()
    });
    rooms.collect()
}

impl Version {
    /// What a group's limits leave; `None` if it has none. The page cache counts as free: the system drops it before it
    /// refuses memory.
    fn room(&self, folder: &Path) -> Option<Room> {
        let number = |name: &str| read(folder, name)?.trim().parse::<u64>().ok();
        let limit = self.limits.iter().filter_map(|name| number(name)).min()?;
        let stat = read(folder, "memory.stat").unwrap_or_default();
        let lines = stat.lines().filter_map(|line| line.split_once(' '));
        let caches = lines.filter(|(key, _)| self.caches.contains(key));
        let cache = caches.filter_map(|(_, bytes)| bytes.trim().parse::<u64>().ok());
        let used = number(self.used).unwrap_or_default();
        Some(Room::under(limit, used.saturating_sub(cache.sum())))
    }
}

/// The folders of a group and of all above it.
///
/// A container may see its group by the host's path, of which its mount shows the end or nothing. What is mounted is
/// then all that is known: the container's own group as a rule, else one above it.
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
