//! Tests with ranks as threads of one process. Bare connections do what real ranks never do: end without a goodbye, or
//! hang.

use super::hub::Hub;
use super::roll::{LEFT, Progress};
use super::wire::{Connection, Message, TICK};
use super::*;
use crate::Error;
use crate::distributed::ranks::Token;
use rstest::rstest;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{scope, sleep};
use std::time::Instant;

const LONG: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(300);
const SILENCE: Duration = Duration::from_millis(150);
const FAST: Pace = pace(LONG, LONG);
/// For ranks that wait for too long.
const OVERDUE: Pace = pace(SHORT, LONG);
const TOKEN: &str = "a token\nof two lines";

type Address = (String, u16);

const fn pace(timeout: Duration, silence: Duration) -> Pace {
    Pace {
        timeout,
        interval: Duration::from_millis(10),
        silence,
    }
}

fn progress(what: &str, number: u64, inside: Option<Duration>) -> Progress {
    Progress {
        entered: number,
        what: what.into(),
        number,
        inside,
    }
}

fn ranks(rank: usize, world_size: usize) -> Ranks {
    Ranks {
        rank,
        local_rank: rank,
        world_size,
        master: None,
        is_one_host: true,
        token: Token::Secret(TOKEN.into()),
    }
}

fn serve(world_size: usize, pace: Pace) -> Hub {
    let listener = listen(&("localhost".into(), 0)).unwrap();
    Hub::start(listener, TOKEN, world_size, pace, "to all".into()).unwrap()
}

/// Joins the first `count` of `world_size` ranks; the closure acts as the others.
fn join(
    count: usize,
    world_size: usize,
    pace: Pace,
    beside: impl FnOnce(&Address),
) -> Vec<Result<Membership>> {
    let hub = serve(world_size, pace);
    let master = &hub.master();
    scope(|scope| {
        let mut hub = Some(hub);
        let join = |rank| {
            let hub = hub.take();
            scope.spawn(move || {
                let (member, welcome) =
                    Membership::join_at(&ranks(rank, world_size), master, hub, pace)?;
                assert_eq!(welcome, "to all");
                Ok(member)
            })
        };
        let joining: Vec<_> = (0..count).map(join).collect();
        beside(master);
        let joined = joining.into_iter().map(|joining| joining.join().unwrap());
        joined.collect()
    })
}

fn job(world_size: usize, pace: Pace) -> Vec<Membership> {
    let joined = join(world_size, world_size, pace, |_| {}).into_iter();
    joined.map(Result::unwrap).collect()
}

/// Opens the connection of a rank that has nothing else.
fn bare(master: &Address, rank: usize, world_size: usize) -> Connection {
    connect(master, Hello::new(rank, world_size, TOKEN), LONG).unwrap()
}

fn next(connection: &mut Connection) -> Message {
    loop {
        if let Some(message) = connection.receive().unwrap() {
            return message;
        }
    }
}

fn beat(connection: &mut Connection, what: &str, number: u64) {
    let progress = progress(what, number, Some(Duration::ZERO));
    connection.send(&Message::Beat(progress)).unwrap();
    while next(connection) != Message::Ack {}
}

/// Asserts that the text contains each part of the words.
#[track_caller]
fn assert_words(text: &str, words: &str) {
    for word in words.split(" .. ") {
        assert!(text.contains(word), "{word:?} is not in {text:?}");
    }
}

/// Asserts that this rank learns of a failure with these words.
#[track_caller]
fn assert_fails(member: &Membership, words: &str) {
    member.shared.wait(LONG, |state| state.failure.is_some());
    assert_words(&member.check().unwrap_err().to_string(), words);
}

#[test]
fn ranks_that_do_not_come_are_named_to_all() {
    for joined in join(2, 4, OVERDUE, |_| {}) {
        let text = joined.err().unwrap().to_string();
        assert_words(
            &text,
            "rank 2, in rendezvous: has not joined within 0.3 s, nor has 3 of 4",
        );
    }
}

#[test]
fn an_end_without_goodbye_is_a_failure_of_that_rank() {
    let mut connection = None;
    let job = join(2, 3, FAST, |master| connection = Some(bare(master, 2, 3)));
    let calls = Arc::new(AtomicUsize::new(0));
    let count = || {
        let calls = calls.clone();
        move || _ = calls.fetch_add(1, Ordering::Relaxed)
    };
    job.iter()
        .flatten()
        .for_each(|member| member.on_failure(count()));
    let mut connection = connection.unwrap();
    beat(&mut connection, "all_reduce", 7);
    drop(connection);
    for member in job.iter().flatten() {
        assert_fails(
            member,
            "rank 2, in all_reduce (operation 7): its process has ended",
        );
        member.on_failure(count());
    }
    drop(job); // all hooks have been called
    assert_eq!(calls.load(Ordering::Relaxed), 4);
}

#[test]
fn a_rank_that_stands_still_is_named_once_others_wait() {
    let mut connection = None;
    let pace = pace(SHORT, SILENCE);
    let job = join(2, 3, pace, |master| {
        let mut bare = bare(master, 2, 3);
        beat(&mut bare, "all_reduce", 1);
        connection = Some(bare);
    });
    let job: Vec<_> = job.into_iter().map(Result::unwrap).collect();
    sleep(2 * SILENCE);
    job[0].check().unwrap(); // silence alone is not a failure
    let _timeout = job[1].enter("all_reduce");
    for member in &job {
        assert_fails(
            member,
            "rank 2, in all_reduce (operation 1): has not been heard of for",
        );
    }
}

/// The ranks that wait, each in an operation of all or of some ranks, after all have finished the first.
#[rstest]
#[case::behind(&[(0, "all_reduce", true), (1, "all_reduce", true)],
    "rank 2, in its own work after broadcast (operation 1): rank .. has waited for .. in all_reduce (operation 2)")]
#[case::another(&[(0, "all_reduce", true), (1, "barrier", true), (2, "all_reduce", true)],
    "all_reduce (operation 2) .. barrier (operation 2)")]
#[case::of_some(&[(1, "receive", false)], "rank 1, in receive: has waited too long, though no rank is behind")]
fn a_wait_for_too_long_names_who_is_behind(
    #[case] waiting: &[(usize, &str, bool)],
    #[case] words: &str,
) {
    let job = job(3, OVERDUE);
    job.iter()
        .for_each(|member| drop(member.enter("broadcast")));
    let watches = waiting.iter();
    let watches = watches.map(|(rank, what, is_of_all)| job[*rank].shared.enter(what, *is_of_all));
    let _watches: Vec<_> = watches.collect();
    job.iter().for_each(|member| assert_fails(member, words));
}

#[rstest]
fn a_rank_that_left_is_named_once_others_wait_for_it(#[values(0, 2)] leaving: usize) {
    let mut job = job(3, pace(LONG, SILENCE));
    drop([1, 2, 0].map(|rank| job[rank].enter("all_reduce")));
    let left = job.remove(leaving);
    let timeout_guard = job[0].enter_some("receive");
    drop(left);
    sleep(2 * TICK);
    drop(timeout_guard);
    job.iter().for_each(|member| member.check().unwrap());
    let _watches = [job[0].enter("barrier"), job[1].enter("barrier")];
    let words = format!("rank {leaving}, in its own work .. has left .. barrier (operation 2)");
    assert_fails(&job[1], &words);
}

/// Rank `rank` of `world_size`, joined to a rank 0 that is only the returned connection.
fn joined_to_bare(rank: usize, world_size: usize, pace: Pace) -> (Membership, Connection) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let master = (
        "127.0.0.1".to_string(),
        listener.local_addr().unwrap().port(),
    );
    scope(|scope| {
        let join = || Membership::join_at(&ranks(rank, world_size), &master, None, pace);
        let joining = scope.spawn(join);
        let (stream, _) = listener.accept().unwrap();
        let mut connection = Connection::new(stream, Some(TICK)).unwrap();
        assert!(matches!(next(&mut connection), Message::Hello(_)));
        for answer in [Message::Ack, Message::Welcome(String::new())] {
            connection.send(&answer).unwrap();
        }
        let (member, _) = joining.join().unwrap().unwrap();
        (member, connection)
    })
}

#[rstest]
#[case(true, "its process has ended")]
#[case(false, "has not been heard of for")]
fn a_rank_0_that_ends_or_stands_still_is_named(#[case] ends: bool, #[case] words: &str) {
    let (member, connection) = joined_to_bare(1, 2, pace(SHORT, SILENCE));
    let _timeout = member.enter("all_reduce");
    let kept = (!ends).then_some(connection);
    assert_fails(&member, &format!("rank 0, in .. {words}"));
    drop(kept);
}

/// Rank 1 is stopped while rank 2 dies and rank 0, which learns of it, ends: rank 1 then reads what was sent meanwhile.
#[test]
fn a_rank_that_was_stopped_hears_which_one_died() {
    let mut others = Vec::new();
    let mut job = join(1, 3, FAST, |master| {
        others.extend([1, 2].map(|rank| bare(master, rank, 3)));
    });
    let rank_0 = job.remove(0).unwrap();
    drop(others.pop());
    assert_fails(&rank_0, "rank 2, in");
    let began = Instant::now();
    drop(rank_0);
    assert!(began.elapsed() < LAST_MESSAGE, "nobody is waited for");
    let mut resumed = others.pop().unwrap();
    assert_eq!(next(&mut resumed), Message::Welcome("to all".into()));
    assert!(matches!(
        next(&mut resumed),
        Message::Failure(Failure { rank: 2, .. })
    ));
}

/// Like the previous test, with a real rank whose connection has been closed.
#[test]
fn what_rank_0_said_before_it_ended_is_read() {
    // Everything here happens between two of its heartbeats.
    let (member, mut connection) = joined_to_bare(
        1,
        3,
        Pace {
            interval: SHORT,
            ..FAST
        },
    );
    let died = Failure::new(2, "all_reduce", "its process has ended", "");
    connection.send(&Message::Failure(died)).unwrap();
    drop(connection);
    assert_fails(&member, "rank 2, in all_reduce: its process has ended");
}

/// Time in which a process was stopped in an operation is not waiting time: the others may have been stopped with it.
#[test]
fn time_in_which_a_rank_was_stopped_is_no_waiting() {
    let shared = Shared::new(1, Pace::new(Duration::from_secs(60)));
    let began = Instant::now();
    locked(&shared.state).run(began, SILENCE);
    let _timeout = shared.enter("all_reduce", true);
    let inside = |now: Instant| {
        let mut state = locked(&shared.state);
        state.run(now, SILENCE);
        now - state.oldest_since().unwrap()
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
    job[2].fail(2, "backward", "out of memory", OWN_OUTPUT);
    job[1].fail(1, "forward", "comes later", OWN_OUTPUT);
    for member in &job {
        assert_fails(member, "rank 2, in backward: out of memory;");
    }
    assert_fails(&job.remove(2), "out of memory");
    drop(job);

    let mut job = super::tests::job(2, FAST);
    let rank_0 = job.remove(0);
    rank_0.fail(0, "forward", "NaN", OWN_OUTPUT);
    drop(rank_0); // the others know by now
    assert_fails(&job[0], "rank 0, in forward: NaN");
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
    assert_fails(
        &job[0],
        "rank 1, in its own work after rendezvous: panicked",
    );
}

#[test]
fn alone_there_is_nobody_to_wait_for() {
    let member = Membership::single_rank();
    let _timeout = member.enter("all_reduce");
    member.check().unwrap();
    member.fail(0, "forward", "NaN", OWN_OUTPUT);
    assert_fails(&member, "rank 0, in forward: NaN");
}

#[test]
fn a_stranger_disturbs_nobody() {
    let mut strangers = Vec::new();
    let job = join(2, 2, FAST, |master| {
        let words = [
            "",
            "GET / HTTP/1.1\r\n\r\n",
            "tallow\u{1f}x\n",
            "\u{0}\n",
            &"x".repeat(100_000),
        ];
        for words in words {
            let mut stream = TcpStream::connect((master.0.as_str(), master.1)).unwrap();
            let _ = stream.write_all(words.as_bytes());
            strangers.push(stream);
        }
    });
    assert_eq!(job.iter().flatten().count(), 2);
    // Strangers that sent something wrong are closed without an answer.
    for stream in &mut strangers[1..] {
        stream.set_read_timeout(Some(LONG)).unwrap();
        let answer = std::io::Read::read(stream, &mut [0; 64]);
        assert!(matches!(&answer, Ok(0)) || answer.is_err(), "{answer:?}");
    }
}

#[test]
fn those_of_another_job_are_refused() {
    let hub = serve(4, FAST);
    let refused = |hello: Hello, words: &str| {
        let began = Instant::now();
        let Err(error @ Error::Order { .. }) = connect(&hub.master(), hello, LONG) else {
            panic!("{words}");
        };
        assert!(began.elapsed() < LONG / 2, "a refusal is not tried again");
        let text = error.to_string();
        assert!(
            text.contains(words) && !text.contains("of two lines"),
            "{text}"
        );
    };
    let hello = || Hello::new(1, 4, TOKEN);
    let old = || Hello {
        version: "0.0.1".into(),
        ..hello()
    };
    refused(
        Hello::new(1, 4, "b"),
        "refuses rank 1: the job's token differs",
    );
    refused(
        Hello {
            world_size: 5,
            ..hello()
        },
        "a world size of 4, and this rank 5",
    );
    refused(old(), "this rank 0.0.1");
    let first = connect(&hub.master(), hello(), LONG).unwrap();
    refused(hello(), "rank 1 has already joined");
    drop(first);
    sleep(2 * TICK);
    refused(hello(), "rank 1 has already joined"); // it has ended, and the job with it
}

/// Without the token a stranger gets no place, declares no failure, and receives no other answer.
#[rstest]
fn a_stranger_can_do_nothing(
    #[values("", "a token\nof two line", "a token\nof two lines ")] token: &str,
) {
    let hub = serve(4, FAST);
    let (host, port) = hub.master();
    let mut stranger =
        Connection::new(TcpStream::connect((host, port)).unwrap(), Some(LONG)).unwrap();
    let hello = Hello {
        version: "0.0.1".into(),
        ..Hello::new(1, 9, token)
    };
    let failure = Failure::new(2, "nothing", "declared by a stranger", LEFT);
    let _ = stranger.send(&Message::Hello(hello));
    let _ = stranger.send(&Message::Failure(failure));
    if let Ok(answer) = stranger.receive() {
        assert_eq!(
            answer,
            Some(Message::Refused("the job's token differs".into()))
        );
    }
    assert!(stranger.receive().is_err(), "it is closed");
    let mut first = bare(&hub.master(), 1, 4); // its place is free
    beat(&mut first, "all_reduce", 1);
    drop(hub);
    assert_eq!(next(&mut first), Message::Left(0), "there is no failure");
}

#[test]
fn a_rank_0_that_is_not_there_is_waited_for_and_named() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let master = ("127.0.0.1".to_string(), free.local_addr().unwrap().port());
    // A listener that accepts connections and sends nothing.
    let error = connect(&master, Hello::new(1, 4, TOKEN), SHORT)
        .err()
        .unwrap();
    let words = format!(
        "rank 0, in rendezvous: has not answered at 127.0.0.1:{} for 0.3 s",
        master.1
    );
    assert_words(&error.to_string(), &words);
    drop(free);
    scope(|scope| {
        let late = scope.spawn(|| connect(&master, Hello::new(1, 4, TOKEN), LONG));
        sleep(SHORT / 3);
        let _hub = Hub::start(listen(&master).unwrap(), TOKEN, 4, FAST, String::new()).unwrap();
        late.join().unwrap().unwrap();
    });
}

#[test]
fn messages_are_read_as_written_and_nothing_else_is() {
    let [progress, outside] = [Some(LONG), None].map(|inside| progress("all_reduce", 3, inside));
    let failure = Failure::new(1, &progress, "ß\n".repeat(10_000), LEFT);
    assert!(failure.texts[1].len() < 10_000);
    let messages = [
        Message::Hello(Hello::new(1, 4, TOKEN)),
        Message::Refused("no\nmore".into()),
        Message::Ack,
        Message::Welcome(String::new()),
        Message::Beat(progress),
        Message::Goodbye(outside),
        Message::Failure(failure),
        Message::Left(9),
    ];
    for message in messages {
        let line = message.line();
        let line = line.strip_suffix('\n').unwrap();
        assert!(!line.contains('\n'));
        assert_eq!(Message::parse(line).as_ref(), Some(&message));
        assert_eq!(Message::parse(&format!("{line}\u{1f}")), None);
    }
    for line in [
        "",
        "beat",
        "left\u{1f}-1",
        "failure\u{1f}x\u{1f}\u{1f}\u{1f}",
    ] {
        assert_eq!(Message::parse(line), None, "{line:?}");
    }
}
