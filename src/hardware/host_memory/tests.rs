//! Tests on folders that imitate `/proc` and `/sys/fs/cgroup`.

use super::{HostMemory, host_memory};
use std::fs;
use std::path::Path;
use tempfile::TempDir;

const MIB: u64 = 1 << 20;

/// A machine of 16 GiB, 12 of them available, with a process in these groups.
struct Machine(TempDir);

impl Machine {
    fn new(groups: &str) -> Self {
        let machine = Self(tempfile::tempdir().unwrap());
        let meminfo = "MemTotal: 16777216 kB\nMemFree: 9437184 kB\nMemAvailable: 12582912 kB\n";
        machine
            .file("proc/meminfo", meminfo)
            .file("proc/self/cgroup", groups)
    }

    fn file(self, path: &str, content: &str) -> Self {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
        self
    }

    /// Adds a group of version 2: its limit, its use, and the page cache in that use, in MiB.
    fn v2(self, folder: &str, max: &str, used: u64, cache: u64) -> Self {
        let file = |name: &str| format!("sys/fs/cgroup/{folder}/{name}");
        let (inactive, active) = (cache * MIB / 4, cache * MIB / 4 * 3);
        let stat = format!("anon 7\ninactive_file {inactive}\nactive_file {active}\nslab 9\n");
        self.file(&file("memory.max"), &in_bytes(max))
            .file(&file("memory.high"), "max\n")
            .file(&file("memory.current"), &format!("{}\n", used * MIB))
            .file(&file("memory.stat"), &stat)
    }

    /// Adds a group of version 1. Its entries without `total_` exclude the groups below.
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

    /// Returns total and available memory, in MiB.
    fn host_memory(&self) -> (u64, u64) {
        let host_memory = host_memory(self.0.path()).unwrap();
        (
            host_memory.total_bytes / MIB,
            host_memory.available_bytes / MIB,
        )
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
    assert_eq!(Machine::new("").host_memory(), OF_MACHINE);
    assert_eq!(Machine::new("0::/\n").host_memory(), OF_MACHINE);
    let unlimited = Machine::new("0::/user.slice\n").v2("user.slice", "max", 900, 0);
    assert_eq!(unlimited.host_memory(), OF_MACHINE);
    let unlimited = Machine::new("4:memory:/\n").v1("", "9223372036854771712", 1, 0);
    assert_eq!(unlimited.host_memory(), OF_MACHINE);
    assert_eq!(host_memory(Path::new("/nowhere")), None);
}

#[test]
fn the_page_cache_is_free() {
    let v2 = Machine::new("0::/run\n").v2("run", "600", 590, 540);
    assert_eq!(v2.host_memory(), (600, 550));
    let v1 = Machine::new("4:cpu,memory:/run\n").v1("run", "600", 590, 540);
    assert_eq!(v1.host_memory(), (600, 550));
}

#[test]
fn nothing_left_is_nothing() {
    let full = Machine::new("0::/run\n").v2("run", "600", 600, 0);
    assert_eq!(full.host_memory(), (600, 0));
    let over = Machine::new("0::/run\n").v2("run", "600", 700, 10);
    assert_eq!(over.host_memory(), (600, 0));
}

#[test]
fn the_least_of_all_levels_counts() {
    // The path that `systemd-run --user --scope -p MemoryMax=600M` creates.
    let path = "user.slice/user-0.slice/user@0.service/app.slice/run-7.scope";
    let machine = || Machine::new(&format!("0::/{path}\n"));
    let own = machine()
        .v2(path, "600", 100, 0)
        .v2("user.slice", "4000", 900, 0);
    assert_eq!(own.host_memory(), (600, 500));
    let shared = machine()
        .v2(path, "6000", 100, 0)
        .v2("user.slice", "4000", 3900, 50);
    assert_eq!(shared.host_memory(), (4000, 150));
    let others = machine().v2("user.slice/other", "1", 1, 0);
    assert_eq!(others.host_memory(), OF_MACHINE);
    // The first group has the smaller limit, the second less memory left.
    let both = machine()
        .v2(path, "600", 100, 0)
        .v2("user.slice", "4000", 3900, 0);
    assert_eq!(both.host_memory(), (600, 100));

    let v1 = Machine::new("4:memory:/a/b\n")
        .v1("a/b", "900", 10, 0)
        .v1("a", "600", 80, 30);
    assert_eq!(v1.host_memory(), (600, 550));
}

#[test]
fn a_process_is_slowed_down_from_memory_high_on() {
    let high = Machine::new("0::/run\n")
        .v2("run", "max", 100, 0)
        .file("sys/fs/cgroup/run/memory.high", "629145600\n");
    assert_eq!(high.host_memory(), (600, 500));
}

#[test]
fn containers_see_their_group_at_the_mount_point() {
    // With a namespace: path and mount begin at the container's group.
    let own = Machine::new("0::/\n").v2("", "600", 100, 0);
    assert_eq!(own.host_memory(), (600, 500));
    // Without one: the path is the host's, and the mount is the container's group.
    let host = Machine::new("4:memory:/docker/abc\n").v1("", "600", 100, 0);
    assert_eq!(host.host_memory(), (600, 500));
    let below = Machine::new("4:memory:/docker/abc/inner\n")
        .v1("", "600", 100, 0)
        .v1("inner", "500", 20, 0);
    assert_eq!(below.host_memory(), (500, 480));
    // A path that leads out of the namespace, and one that does not exist.
    for group in ["0::/../other\n", "0::/docker/abc\n"] {
        let elsewhere = Machine::new(group).v2("", "600", 100, 0);
        assert_eq!(elsewhere.host_memory(), (600, 500));
    }
}

#[test]
fn memory_may_be_in_either_version() {
    // Lines of a system with both versions; memory is in version 1.
    let groups = "9:name=systemd:/\n4:memory:/run\n1:cpu:/else\n0::/run\n";
    let hybrid = Machine::new(groups).v1("run", "600", 100, 0);
    assert_eq!(hybrid.host_memory(), (600, 500));
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
        Machine::new("")
            .file("proc/self/limits", &limits(address_space, data))
            .file("proc/self/status", status)
    };
    assert_eq!(machine("unlimited", "unlimited").host_memory(), OF_MACHINE);
    assert_eq!(
        machine("1048576000", "unlimited").host_memory(),
        (1000, 800)
    );
    assert_eq!(
        machine("unlimited", "1048576000").host_memory(),
        (1000, 900)
    );
    assert_eq!(machine("1", "unlimited").host_memory(), (0, 0));
}

#[test]
fn this_machine_has_room() {
    let HostMemory {
        total_bytes,
        available_bytes,
    } = host_memory(Path::new("/")).unwrap();
    assert!(available_bytes <= total_bytes && total_bytes > MIB);
}
