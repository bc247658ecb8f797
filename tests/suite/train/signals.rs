//! Ctrl-C, SIGTERM and SIGHUP, as handled by the example `train`.
#![cfg(unix)]

#[path = "../../../examples/train/signals.rs"]
mod listener;

use listener::{Signals, exit_status};
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

const ROLE: &str = "TALLOW_TEST_SIGNALS";

/// Not a test: the process of a role, which sleeps and, if it is "exits_after_signal", exits after a signal.
#[test]
#[ignore = "run by the tests below"]
fn listen() {
    let Some(role) = std::env::var_os(ROLE) else {
        return;
    };
    let mut signals = Some(Signals::listen().unwrap());
    if role == "done" {
        signals = None;
    }
    println!("\nlistening");
    let mut seen = false;
    loop {
        if let Some(signal) = signals
            .as_ref()
            .and_then(|signals| signals.received(None).unwrap())
        {
            if role == "exits_after_signal" {
                std::process::exit(exit_status(signal).into());
            }
            if !seen {
                println!("\nbusy after {signal}");
            }
            seen = true;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Starts a process in a role; returns it and the lines that it prints.
fn child(role: &str) -> (Child, impl Iterator<Item = String>) {
    started(Command::new(std::env::current_exe().unwrap()), role)
}

fn started(mut command: Command, role: &str) -> (Child, impl Iterator<Item = String>) {
    let mut child = command
        .args([
            "train::signals::listen",
            "--exact",
            "--ignored",
            "--nocapture",
        ])
        .env(ROLE, role)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap())
        .lines()
        .map(Result::unwrap);
    assert!(lines.any(|line| line == "listening"));
    (child, lines)
}

fn send(child: &Child, signal: i32) {
    // SAFETY: a process that this one started and has not waited for.
    assert_eq!(unsafe { libc::kill(child.id() as i32, signal) }, 0);
}

fn status(mut child: Child) -> ExitStatus {
    child.wait().unwrap()
}

#[test]
fn the_first_one_is_noted_and_gives_the_status() {
    for (signal, code) in [
        (libc::SIGINT, 130),
        (libc::SIGTERM, 143),
        (libc::SIGHUP, 129),
    ] {
        let (child, _lines) = child("exits_after_signal");
        send(&child, signal);
        assert_eq!(status(child).code(), Some(code));
    }
}

#[test]
fn the_second_one_ends_at_once() {
    for (first, second, code) in [
        (libc::SIGINT, libc::SIGINT, 130),
        (libc::SIGINT, libc::SIGTERM, 143),
        (libc::SIGTERM, libc::SIGINT, 130),
        (libc::SIGHUP, libc::SIGTERM, 143),
    ] {
        let (child, mut lines) = child("busy");
        send(&child, first);
        assert!(lines.any(|line| line.starts_with("busy after")));
        send(&child, second);
        assert_eq!(status(child).code(), Some(code));
    }
}

/// When nothing is left to save, the first signal ends the process.
#[test]
fn afterwards_the_first_one_ends_at_once() {
    let (child, _lines) = child("done");
    send(&child, libc::SIGTERM);
    assert_eq!(status(child).code(), Some(143));
}

/// `nohup` ignores SIGHUP, which stays ignored: the process ends with the signal that follows.
#[test]
fn an_ignored_hangup_stays_ignored() {
    use std::os::unix::process::CommandExt;
    let mut command = Command::new(std::env::current_exe().unwrap());
    // SAFETY: signal is safe to call between fork and exec.
    unsafe {
        command.pre_exec(|| {
            libc::signal(libc::SIGHUP, libc::SIG_IGN);
            Ok(())
        });
    }
    let (child, _lines) = started(command, "exits_after_signal");
    send(&child, libc::SIGHUP);
    send(&child, libc::SIGTERM);
    assert_eq!(status(child).code(), Some(143));
}
