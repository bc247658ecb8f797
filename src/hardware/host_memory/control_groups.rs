//! The memory limits of control groups, of version 1 and of version 2.

use super::{Room, read};
use std::path::{Component, Path, PathBuf};

/// The room that each limited group leaves, from this process's own to the root, in both versions: a system may have
/// both, with memory in one of them.
pub(super) fn rooms(root: &Path) -> Vec<Room> {
    let (Some(groups), Some(mounts)) = (
        read(root, "proc/self/cgroup"),
        read(root, "proc/self/mountinfo"),
    ) else {
        return Vec::new();
    };
    let mut rooms = Vec::new();
    for version in [Version::One, Version::Two] {
        if let Some(group) = version.group(&groups) {
            let mounts = mounts
                .lines()
                .filter_map(|line| Mount::parse(line, version));
            let levels = levels(group, &mounts.collect::<Vec<_>>());
            rooms.extend(
                levels
                    .iter()
                    .filter_map(|folder| version.room(root, folder)),
            );
        }
    }
    rooms
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Version {
    One,
    Two,
}

impl Version {
    /// The path of this process's group, from lines `id:controllers:path` of `/proc/self/cgroup`.
    fn group(self, groups: &str) -> Option<&Path> {
        groups.lines().find_map(|line| {
            let mut parts = line.splitn(3, ':');
            let (id, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
            let is_ours = match self {
                Self::One => controllers.split(',').any(|name| name == "memory"),
                Self::Two => id == "0" && controllers.is_empty(),
            };
            is_ours.then_some(Path::new(path))
        })
    }

    /// What a group's limits leave; `None` if it has none. The page cache counts as free: the system drops it before it
    /// refuses memory.
    fn room(self, root: &Path, folder: &Path) -> Option<Room> {
        let number = |name: &str| read(root, folder.join(name))?.trim().parse::<u64>().ok();
        // Beyond `memory.high` a process is not killed, but slowed down until it hardly runs.
        let (limits, used, caches): (&[&str], _, _) = match self {
            Self::One => (
                &["memory.limit_in_bytes"],
                "memory.usage_in_bytes",
                ["total_inactive_file", "total_active_file"],
            ),
            Self::Two => (
                &["memory.max", "memory.high"],
                "memory.current",
                ["inactive_file", "active_file"],
            ),
        };
        let limit = limits.iter().filter_map(|name| number(name)).min()?;
        let stat = read(root, folder.join("memory.stat")).unwrap_or_default();
        let cache = caches.iter().filter_map(|name| {
            let mut lines = stat.lines().filter_map(|line| line.split_once(' '));
            lines
                .find(|(key, _)| key == name)?
                .1
                .trim()
                .parse::<u64>()
                .ok()
        });
        let used = number(used).unwrap_or_default();
        Some(Room::under(limit, used.saturating_sub(cache.sum())))
    }
}

/// A mounted hierarchy of groups, or a part of one.
struct Mount {
    /// The group that it shows.
    root: PathBuf,
    /// Where it shows it.
    point: PathBuf,
}

impl Mount {
    /// From a line of `/proc/self/mountinfo`: `31 23 0:28 ROOT POINT OPTIONS .. - TYPE SOURCE OPTIONS`.
    fn parse(line: &str, version: Version) -> Option<Self> {
        let (mount, system) = line.split_once(" - ")?;
        let mut system = system.split(' ');
        let (kind, options) = (system.next()?, system.nth(1).unwrap_or_default());
        let is_ours = match version {
            Version::One => kind == "cgroup" && options.split(',').any(|name| name == "memory"),
            Version::Two => kind == "cgroup2",
        };
        let mut fields = mount.split(' ').skip(3);
        let (root, point) = (fields.next()?, fields.next()?);
        is_ours.then(|| Self {
            root: unescaped(root),
            point: unescaped(point),
        })
    }
}

/// The folders of a group and of all above it that a mount shows.
///
/// A container may see its group by another path than its mounts do, for they may come from outside of its namespace.
/// What is mounted is then all that is known: the container's own group as a rule, else one above it.
fn levels(group: &Path, mounts: &[Mount]) -> Vec<PathBuf> {
    let is_below = |path: &Path| !path.components().any(|part| part == Component::ParentDir);
    let found = mounts.iter().find_map(|mount| {
        let below = group.strip_prefix(&mount.root).ok()?;
        is_below(below).then_some((mount, below))
    });
    let found = found.or_else(|| Some((mounts.first()?, Path::new(""))));
    let Some((mount, below)) = found else {
        return Vec::new();
    };
    let levels = below.ancestors().map(|level| mount.point.join(level));
    levels.collect()
}

/// Spaces, tabs, line ends and backslashes are written in octal: `\040`.
fn unescaped(path: &str) -> PathBuf {
    let mut parts = path.split('\\');
    let mut plain = parts.next().unwrap_or_default().to_string();
    for part in parts {
        let code = part
            .get(..3)
            .and_then(|code| u8::from_str_radix(code, 8).ok());
        match code {
            Some(code) => {
                plain.push(code.into());
                plain.push_str(&part[3..]);
            }
            None => {
                plain.push('\\');
                plain.push_str(part);
            }
        }
    }
    plain.into()
}
