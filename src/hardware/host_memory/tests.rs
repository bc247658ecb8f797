//! Folders that play `/proc` and `/sys/fs/cgroup`.

use super::{Room, room};
use std::fs;
use std::path::Path;
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
const V2: &str = "42 32 0:39 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n";
const V1: &str = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n";

/// A machine of 16 GiB, 12 of them available, whose process is in these groups, with these mounts.
struct Machine(TempDir);

impl Machine {
    fn new(groups: &str, mounts: &str) -> Self {
        let machine = Self(tempfile::tempdir().unwrap());
        let meminfo = "MemTotal: 16777216 kB\nMemFree: 9437184 kB\nMemAvailable: 12582912 kB\n";
        machine
            .file("proc/meminfo", meminfo)
            .file("proc/self/cgroup", groups)
            .file("proc/self/mountinfo", mounts)
    }

    fn file(self, path: &str, content: &str) -> Self {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
        self
    }

    /// A group of version 2: its limit, what it uses, and how much of that is page cache, in MiB.
    fn v2(self, folder: &str, max: &str, used: u64, cache: u64) -> Self {
        let file = |name: &str| format!("sys/fs/cgroup/{folder}/{name}");
        let (inactive, active) = (cache * MIB / 4, cache * MIB / 4 * 3);
        let stat = format!("anon 7\ninactive_file {inactive}\nactive_file {active}\nslab 9\n");
        self.file(&file("memory.max"), &in_bytes(max))
            .file(&file("memory.high"), "max\n")
            .file(&file("memory.current"), &format!("{}\n", used * MIB))
            .file(&file("memory.stat"), &stat)
    }

    /// The same of version 1, whose own counts are without the groups below.
    fn v1(self, folder: &str, max: &str, used: u64, cache: u64) -> Self {
        let file = |name: &str| format!("sys/fs/cgroup/memory/{folder}/{name}");
        let stat = format!(
            "cache 0\ninactive_file 0\nactive_file 0\ntotal_inactive_file {}\ntotal_active_file 0\n",
            cache * MIB
        );
        self.file(&file("memory.limit_in_bytes"), &in_bytes(max))
            .file(&file("memory.usage_in_bytes"), &format!("{}\n", used * MIB))
            .file(&file("memory.stat"), &stat)
    }

    /// Total and available, in MiB.
    fn room(&self) -> (u64, u64) {
        let room = room(self.0.path()).unwrap();
        (room.total_bytes / MIB, room.available_bytes / MIB)
    }
}

fn in_bytes(max: &str) -> String {
    match max.parse::<u64>() {
        Ok(mib) => format!("{}\n", mib * MIB),
        Err(_) => format!("{max}\n"),
    }
}

const OF_MACHINE: (u64, u64) = (16_384, 12_288);

#[test]
fn without_limits_it_is_the_machines() {
    assert_eq!(Machine::new("", "").room(), OF_MACHINE);
    let no_groups = Machine::new("0::/\n", "");
    assert_eq!(no_groups.room(), OF_MACHINE);
    let unlimited = Machine::new("0::/user.slice\n", V2).v2("user.slice", "max", 900, 0);
    assert_eq!(unlimited.room(), OF_MACHINE);
    let unlimited = Machine::new("4:memory:/\n", V1).v1("", "9223372036854771712", 1, 0);
    assert_eq!(unlimited.room(), OF_MACHINE);
    assert_eq!(room(Path::new("/nowhere")), None);
}

#[test]
fn the_page_cache_is_free() {
    let v2 = Machine::new("0::/run\n", V2).v2("run", "600", 590, 540);
    assert_eq!(v2.room(), (600, 550));
    let v1 = Machine::new("4:cpu,memory:/run\n", V1).v1("run", "600", 590, 540);
    assert_eq!(v1.room(), (600, 550));
}

#[test]
fn nothing_left_is_nothing() {
    let full = Machine::new("0::/run\n", V2).v2("run", "600", 600, 0);
    assert_eq!(full.room(), (600, 0));
    let over = Machine::new("0::/run\n", V2).v2("run", "600", 700, 10);
    assert_eq!(over.room(), (600, 0));
}

#[test]
fn the_least_of_all_levels_counts() {
    // As `systemd-run --user --scope -p MemoryMax=600M` makes it.
    let path = "user.slice/user-0.slice/user@0.service/app.slice/run-7.scope";
    let machine = || Machine::new(&format!("0::/{path}\n"), V2);
    let own = machine()
        .v2(path, "600", 100, 0)
        .v2("user.slice", "4000", 900, 0);
    assert_eq!(own.room(), (600, 500));
    let shared = machine()
        .v2(path, "6000", 100, 0)
        .v2("user.slice", "4000", 3900, 50);
    assert_eq!(shared.room(), (4000, 150));
    let others = machine().v2("user.slice/other", "1", 1, 0);
    assert_eq!(others.room(), OF_MACHINE);
    // The first has less in all, the second less left.
    let both = machine()
        .v2(path, "600", 100, 0)
        .v2("user.slice", "4000", 3900, 0);
    assert_eq!(both.room(), (600, 100));

    let v1 = Machine::new("4:memory:/a/b\n", V1)
        .v1("a/b", "900", 10, 0)
        .v1("a", "600", 80, 30);
    assert_eq!(v1.room(), (600, 550));
}

#[test]
fn a_process_is_slowed_down_from_memory_high_on() {
    let high = Machine::new("0::/run\n", V2)
        .v2("run", "max", 100, 0)
        .file("sys/fs/cgroup/run/memory.high", "629145600\n");
    assert_eq!(high.room(), (600, 500));
}

#[test]
fn containers_see_their_group_at_the_mount_point() {
    // A namespace of its own: path and mount begin at the container's group.
    let own = Machine::new("0::/\n", V2).v2("", "600", 100, 0);
    assert_eq!(own.room(), (600, 500));
    // None: the path is the host's, and so is what the mount shows of it.
    let mount = V1.replace(" / ", " /docker/abc ");
    let host = Machine::new("4:memory:/docker/abc\n", &mount).v1("", "600", 100, 0);
    assert_eq!(host.room(), (600, 500));
    let below = Machine::new("4:memory:/docker/abc/inner\n", &mount)
        .v1("", "600", 100, 0)
        .v1("inner", "500", 20, 0);
    assert_eq!(below.room(), (500, 480));
    // A mount from outside of the namespace, and a path that leads out of it.
    let outside = V2.replace(" / ", " /../.. ");
    let outside = Machine::new("0::/\n", &outside).v2("", "600", 100, 0);
    assert_eq!(outside.room(), (600, 500));
    let elsewhere = Machine::new("0::/../other\n", V2).v2("", "600", 100, 0);
    assert_eq!(elsewhere.room(), (600, 500));
    // A path that is not there.
    let gone = Machine::new("0::/docker/abc\n", V2).v2("", "600", 100, 0);
    assert_eq!(gone.room(), (600, 500));
}

#[test]
fn another_groups_mount_is_not_ours() {
    let mounts = format!(
        "{}{V2}",
        V2.replace(" / /sys/fs/cgroup ", " /other /mnt/other ")
    );
    let machine = Machine::new("0::/run\n", &mounts)
        .v2("run", "600", 100, 0)
        .file("mnt/other/memory.max", "1048576\n");
    assert_eq!(machine.room(), (600, 500));
}

#[test]
fn memory_may_be_in_either_version() {
    // As this line is on systems with both, memory is of version 1.
    let groups = "9:name=systemd:/\n4:memory:/run\n1:cpu:/else\n0::/run\n";
    let mounts = format!(
        "{}{V1}",
        V2.replace("/sys/fs/cgroup ", "/sys/fs/cgroup/unified ")
    );
    let hybrid = Machine::new(groups, &mounts).v1("run", "600", 100, 0);
    assert_eq!(hybrid.room(), (600, 500));
}

#[test]
fn mount_points_have_their_spaces_back() {
    let mounts = V2.replace("/sys/fs/cgroup", "/a\\040b\\134c");
    let machine = Machine::new("0::/run\n", &mounts)
        .file("a b\\c/run/memory.max", "629145600\n")
        .file("a b\\c/run/memory.current", "104857600\n");
    assert_eq!(machine.room(), (600, 500));
}

#[test]
fn the_processs_own_limits_count() {
    let limits = |address_space: &str, data: &str| {
        format!(
            "Limit                     Soft Limit           Hard Limit           Units     \n\
             Max data size             {data}            unlimited            bytes     \n\
             Max address space         {address_space}   unlimited            bytes     \n"
        )
    };
    let status = "Name:\ttallow\nVmPeak:\t 999999 kB\nVmSize:\t  204800 kB\nVmData:\t  102400 kB\n";
    let machine = |address_space, data| {
        Machine::new("", "")
            .file("proc/self/limits", &limits(address_space, data))
            .file("proc/self/status", status)
    };
    assert_eq!(machine("unlimited", "unlimited").room(), OF_MACHINE);
    assert_eq!(machine("1048576000", "unlimited").room(), (1000, 800));
    assert_eq!(machine("unlimited", "1048576000").room(), (1000, 900));
    assert_eq!(machine("1", "unlimited").room(), (0, 0));
}

#[test]
fn this_machine_has_room() {
    let Room {
        total_bytes,
        available_bytes,
    } = room(Path::new("/")).unwrap();
    assert!(available_bytes <= total_bytes && total_bytes > MIB);
}
