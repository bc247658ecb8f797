use super::*;

const LONG: Duration = Duration::from_secs(60);
const PATIENT: Grace = Grace {
    hear: LONG,
    end: LONG,
};

/// Runs `sh -c script` as each of `world_size` ranks; returns the failed rank, and the output and errors.
fn run(world_size: usize, script: &str, grace: Grace) -> (Option<FailedRank>, [String; 2]) {
    let sinks = [(); 2].map(|()| Arc::new(Mutex::new(Vec::<u8>::new())));
    let command = |_| {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    };
    let [out, err] = sinks.clone();
    let failed = launch_commands(world_size, command, [out, err], grace).unwrap();
    let texts = sinks.map(|sink| String::from_utf8(sink.lock().unwrap().clone()).unwrap());
    (failed, texts)
}

#[test]
fn ranks_know_their_places_and_their_lines_come_out_whole() {
    let script = "echo $RANK/$LOCAL_RANK of $WORLD_SIZE at $MASTER_ADDR ${#TALLOW_JOB_TOKEN}; \
                  printf half >&2; printf 'way\\nend' >&2";
    let (failed, [out, err]) = run(3, script, PATIENT);
    assert_eq!(failed, None);
    let sorted = |text: &str| {
        let mut lines: Vec<_> = text.lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    let place = |rank| format!("{rank}/{rank} of 3 at 127.0.0.1 32");
    assert_eq!(
        sorted(&out),
        [
            place(0),
            format!("[1] {}", place(1)),
            format!("[2] {}", place(2))
        ]
    );
    let lines = [
        "[0] end",
        "[0] halfway",
        "[1] end",
        "[1] halfway",
        "[2] end",
        "[2] halfway",
    ];
    assert_eq!(sorted(&err), lines);
}

/// Ranks get their own places, whatever launcher started this process.
#[test]
fn variables_of_other_launchers_are_removed() {
    let command = |_| {
        let mut command = Command::new("sh");
        let outer =
            "SLURM_PROCID=7 OMPI_COMM_WORLD_RANK=7 PMI_RANK=7 TORCHELASTIC_RUN_ID=7".split(' ');
        command.envs(outer.map(|pair| pair.split_once('=').unwrap()));
        command.args([
            "-c",
            "echo $RANK.$SLURM_PROCID$OMPI_COMM_WORLD_RANK$PMI_RANK$TORCHELASTIC_RUN_ID",
        ]);
        command
    };
    let out = Arc::new(Mutex::new(Vec::<u8>::new()));
    let sinks: [Sink; 2] = [out.clone(), Arc::new(Mutex::new(Vec::new()))];
    assert_eq!(launch_commands(1, command, sinks, PATIENT).unwrap(), None);
    assert_eq!(out.lock().unwrap().as_slice(), b"0.\n");
}

/// Rank 0 fails once rank 1 has run `first`; rank 1 would never end.
fn fails_beside(first: &str, grace: Grace) -> String {
    let ready = std::env::temp_dir().join(format!("tallow-launch-{}", rand::random::<u64>()));
    let script = format!(
        "if [ $RANK = 1 ]; then {first}; : >{0}; while :; do sleep 0.02; done; fi
         while [ ! -e {0} ]; do sleep 0.01; done; exit 7",
        ready.display()
    );
    let (failed, [out, _]) = run(2, &script, grace);
    std::fs::remove_file(ready).unwrap();
    let failed = failed.unwrap();
    assert_eq!((failed.rank, failed.exit_code()), (0, 7));
    out
}

#[test]
fn one_that_fails_ends_the_others() {
    // The other rank has time to report the failure.
    let (failed, [out, _]) = run(
        2,
        "[ $RANK = 1 ] && exit 3; sleep 0.2; echo heard; exit 1",
        PATIENT,
    );
    assert_eq!((failed.unwrap().exit_code(), out.as_str()), (3, "heard\n"));
    // It is asked to end.
    let hasty = Grace {
        hear: Duration::ZERO,
        end: LONG,
    };
    let out = fails_beside("trap 'echo told; exit 1' TERM", hasty);
    assert_eq!(out, "[1] told\n");
    // It ignores SIGTERM.
    let end = Duration::from_millis(50);
    fails_beside("trap '' TERM", Grace { end, ..hasty });
}

#[test]
fn a_signal_is_an_exit_code() {
    let (failed, _) = run(2, "[ $RANK = 0 ] || kill -9 $$", PATIENT);
    let failed = failed.unwrap();
    assert_eq!((failed.rank, failed.exit_code()), (1, 137));
    assert!(
        failed
            .to_string()
            .starts_with("rank 1 was the first to fail, with signal: 9"),
        "{failed}"
    );
}

#[test]
fn what_cannot_start_is_named() {
    let sinks = || [(); 2].map(|()| -> Sink { Arc::new(Mutex::new(Vec::new())) });
    let error = launch_commands(2, |_| Command::new("/no/such"), sinks(), PATIENT).unwrap_err();
    assert!(
        error.to_string().contains("/no/such: cannot start"),
        "{error}"
    );
    assert!(launch_commands(0, |_| Command::new("true"), sinks(), PATIENT).is_err());
}
