//! Whose failure it is that the ranks hear of.

use super::*;
use crate::distributed::store::Failure;

#[test]
fn ranks_that_do_not_come_are_named_to_all() {
    for joined in join(2, 4, SHORT, FAST, |_| {}) {
        let text = joined.err().unwrap().to_string();
        assert_words(
            &text,
            &["rank 2, in rendezvous: has not come within 0.3 s, nor has 3 of 4"],
        );
    }
}

#[test]
fn an_end_without_goodbye_is_a_failure_of_that_rank() {
    let mut connection = None;
    let job = join(2, 3, LONG, FAST, |master| {
        connection = Some(bare(master, 2, 3))
    });
    let calls = Arc::new(AtomicUsize::new(0));
    for member in job.iter().flatten() {
        let calls = calls.clone();
        member.on_failure(move || _ = calls.fetch_add(1, Ordering::Relaxed));
    }
    let mut connection = connection.unwrap();
    assert_eq!(beat(&mut connection, "all_reduce", 7), Reply::Done);
    drop(connection);
    for member in job.iter().flatten() {
        let text = failure(member);
        assert_words(
            &text,
            &["rank 2, in all_reduce (operation 7): its process has ended"],
        );
        let text = member.get("never set", 2).unwrap_err().to_string();
        assert_words(&text, &["its process has ended"]);
        let calls = calls.clone();
        member.on_failure(move || _ = calls.fetch_add(1, Ordering::Relaxed));
    }
    drop(job); // with all hooks called
    assert_eq!(calls.load(Ordering::Relaxed), 4);
}

#[test]
fn a_rank_that_stands_still_is_named_once_others_wait() {
    let mut connection = None;
    let pace = Pace {
        silence: SILENCE,
        ..OVERDUE
    };
    let job = join(2, 3, LONG, pace, |master| {
        let mut bare = bare(master, 2, 3);
        beat(&mut bare, "all_reduce", 1);
        connection = Some(bare);
    });
    let job: Vec<_> = job.into_iter().map(Result::unwrap).collect();
    thread::sleep(2 * SILENCE);
    job[0].check().unwrap(); // silence alone is no failure
    let _watch = job[1].enter("all_reduce");
    for member in &job {
        assert_words(
            &failure(member),
            &["rank 2, in all_reduce (operation 1): has not been heard of for"],
        );
    }
    drop(connection); // or rank 0 would wait for it to hear
}

#[test]
fn a_rank_that_is_behind_is_named() {
    let job = job(3, OVERDUE);
    for member in &job {
        drop(member.enter("broadcast"));
    }
    let _watches = [job[0].enter("all_reduce"), job[1].enter("all_reduce")];
    for member in &job {
        assert_words(
            &failure(member),
            &[
                "rank 2, in its own work after broadcast (operation 1): rank ",
                " has waited for ",
                " in all_reduce (operation 2)",
            ],
        );
    }
}

#[test]
fn operations_that_do_not_match_are_named() {
    let job = job(2, OVERDUE);
    let _watches = [job[0].enter("all_reduce"), job[1].enter("barrier")];
    assert_words(
        &failure(&job[0]),
        &["all_reduce (operation 1)", "barrier (operation 1)"],
    );
}

#[test]
fn what_only_some_take_part_in_does_not_count() {
    let job = job(3, OVERDUE);
    drop(job[0].enter_some("send"));
    let _watch = job[1].enter_some("receive");
    assert_words(
        &failure(&job[2]),
        &["rank 1, in receive: has waited too long, though no rank is behind"],
    );
}

#[test]
fn a_rank_that_left_is_named_once_others_wait_for_it() {
    for leaving in [0, 2] {
        let mut job = job(
            3,
            Pace {
                silence: SILENCE,
                ..FAST
            },
        );
        let watches = [1, 2, 0].map(|rank| job[rank].enter("all_reduce"));
        drop(watches);
        let left = job.remove(leaving);
        let watch = job[0].enter_some("receive");
        drop(left);
        thread::sleep(Duration::from_millis(50));
        drop(watch);
        for member in &job {
            member.check().unwrap();
        }
        let _watches = [job[0].enter("barrier"), job[1].enter("barrier")];
        let text = failure(&job[1]);
        assert_words(
            &text,
            &[
                &format!("rank {leaving}, in its own work"),
                "has left",
                "barrier (operation 2)",
            ],
        );
    }
}

#[test]
fn a_rank_0_that_ends_or_stands_still_is_named() {
    let pace = Pace {
        silence: SILENCE,
        ..OVERDUE
    };
    for (ends, words) in [
        (true, "its process has ended"),
        (false, "has not been heard of for"),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let master = (
            "127.0.0.1".to_string(),
            listener.local_addr().unwrap().port(),
        );
        scope(|scope| {
            let accept = || {
                let (stream, _) = listener.accept().unwrap();
                let mut connection = Connection::new(stream, LONG).unwrap();
                connection.line(|| true).unwrap();
                connection.send_line("welcome\n").unwrap();
                connection
            };
            let joining =
                scope.spawn(|| Membership::join_at(&ranks(1, 2), &master, None, LONG, pace));
            let mut store = accept();
            let heartbeat = accept();
            store.frame(|| true).unwrap();
            store.send(&Reply::Missing(Vec::new()).encode()).unwrap();
            let member = joining.join().unwrap().unwrap();
            let _watch = member.enter("all_reduce");
            let kept = (!ends).then_some((store, heartbeat));
            assert_words(&failure(&member), &["rank 0, in ", words]);
            drop(kept);
        });
    }
}

/// Rank 1 is stopped while rank 2 dies and rank 0, which hears of it, ends: it reads what has come meanwhile.
#[test]
fn a_rank_that_was_stopped_hears_which_one_died() {
    let mut others = Vec::new();
    let mut job = join(1, 3, LONG, FAST, |master| {
        others.extend([1, 2].map(|rank| bare(master, rank, 3)));
    });
    let rank_0 = job.remove(0).unwrap();
    drop(others.pop());
    assert_words(&failure(&rank_0), &["rank 2, in "]);
    let began = Instant::now();
    drop(rank_0);
    assert!(began.elapsed() < LAST_WORDS, "nobody is waited for");
    let mut resumed = others.pop().unwrap();
    match Reply::decode(&resumed.frame(|| true).unwrap()).unwrap() {
        Reply::Failed(failure) => assert_eq!(failure.rank, 2),
        other => panic!("{other:?}"),
    }
}

/// The same, where the resumed one is a rank as it is, whose connection has been closed.
#[test]
fn what_rank_0_said_before_it_ended_is_read() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let master = (
        "127.0.0.1".to_string(),
        listener.local_addr().unwrap().port(),
    );
    // Between its heartbeats there is time for all that happens here.
    let pace = Pace {
        interval: SHORT,
        ..FAST
    };
    scope(|scope| {
        let accept = || {
            let (stream, _) = listener.accept().unwrap();
            let mut connection = Connection::new(stream, LONG).unwrap();
            connection.line(|| true).unwrap();
            connection.send_line("welcome\n").unwrap();
            connection
        };
        let joining = scope.spawn(|| Membership::join_at(&ranks(1, 3), &master, None, LONG, pace));
        let mut store = accept();
        let mut heartbeat = accept();
        store.frame(|| true).unwrap();
        store.send(&Reply::Missing(Vec::new()).encode()).unwrap();
        let member = joining.join().unwrap().unwrap();
        let died = Failure::new(2, "all_reduce", "its process has ended", "");
        heartbeat.send(&Reply::Failed(died).encode()).unwrap();
        drop((store, heartbeat));
        assert_words(
            &failure(&member),
            &["rank 2, in all_reduce: its process has ended"],
        );
    });
}

/// A process that was stopped in an operation has not waited for the others meanwhile, which may have been stopped with
/// it.
#[test]
fn time_in_which_a_rank_was_stopped_is_no_waiting() {
    let shared = Shared::new(1, Pace::new(Duration::from_secs(60)));
    let began = Instant::now();
    locked(&shared.state).run(began, SILENCE);
    let _watch = shared.enter("all_reduce", true);
    let inside = |now: Instant| {
        let mut state = locked(&shared.state);
        state.run(now, SILENCE);
        now - state.doing_since().unwrap()
    };
    let hour = Duration::from_secs(3600);
    assert!(inside(began + SILENCE) <= SILENCE);
    let resumed = began + SILENCE + hour;
    assert!(inside(resumed) <= SILENCE, "stopped for an hour");
    // Now it runs, and waits.
    assert!(inside(resumed + SILENCE) >= SILENCE);
}

#[test]
fn a_failure_of_its_own_is_told_to_all() {
    let mut job = job(3, FAST);
    job[2].fail("backward", "out of memory");
    job[1].fail("forward", "comes later");
    for member in &job {
        assert_words(&failure(member), &["rank 2, in backward: out of memory; "]);
    }
    assert_words(&failure(&job.remove(2)), &["out of memory"]);
    drop(job);

    let mut job = super::job(2, FAST);
    let rank_0 = job.remove(0);
    rank_0.fail("forward", "NaN");
    drop(rank_0); // the others have heard by now
    assert_words(&failure(&job[0]), &["rank 0, in forward: NaN"]);
}

#[test]
fn a_panic_is_a_failure() {
    let mut job = job(2, FAST);
    let member = job.remove(1);
    let panics = thread::spawn(move || {
        let _member = member;
        std::panic::resume_unwind(Box::new("on purpose"));
    });
    assert!(panics.join().is_err());
    assert_words(&failure(&job[0]), &["rank 1, in its own work: panicked"]);
}
