//! Ranks as threads of one process. What no rank of ours does (end without a goodbye, stand still), a bare connection
//! does here.

mod failures;

use super::*;
use crate::distributed::ranks::Token;
use crate::distributed::store::{Connection, Doing, Reply, Request};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::scope;

const LONG: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(300);
const FAST: Pace = Pace {
    timeout: LONG,
    interval: Duration::from_millis(10),
    silence: LONG,
};
/// For ranks that wait for too long.
const OVERDUE: Pace = Pace {
    timeout: SHORT,
    ..FAST
};
const SILENCE: Duration = Duration::from_millis(150);

fn ranks(rank: usize, world_size: usize) -> Ranks {
    Ranks {
        rank,
        local_rank: rank,
        world_size,
        master: None,
        is_one_host: true,
        token: Token::Secret("a token".into()),
    }
}

fn serve(world_size: usize, pace: Pace) -> Server {
    let listener = listen(&("127.0.0.1".into(), 0)).unwrap();
    Server::start(listener, "a token", world_size, pace.silence).unwrap()
}

/// The first `count` of `world_size` ranks join; `beside` plays the others.
fn join(
    count: usize,
    world_size: usize,
    meet: Duration,
    pace: Pace,
    beside: impl FnOnce(&(String, u16)),
) -> Vec<Result<Membership>> {
    let server = serve(world_size, pace);
    let master = &server.master();
    scope(|scope| {
        let mut server = Some(server);
        let join = |rank| {
            let server = server.take();
            let join =
                move || Membership::join_at(&ranks(rank, world_size), master, server, meet, pace);
            scope.spawn(join)
        };
        let joining: Vec<_> = (0..count).map(join).collect();
        beside(master);
        joining
            .into_iter()
            .map(|joining| joining.join().unwrap())
            .collect()
    })
}

fn job(world_size: usize, pace: Pace) -> Vec<Membership> {
    join(world_size, world_size, LONG, pace, |_| {})
        .into_iter()
        .map(Result::unwrap)
        .collect()
}

/// The heartbeat of a rank that is nothing but that.
fn bare(master: &(String, u16), rank: usize, world_size: usize) -> Connection {
    connect(
        master,
        &Hello::new(Purpose::Heartbeat, rank, world_size, "a token"),
        LONG,
    )
    .unwrap()
}

fn beat(connection: &mut Connection, what: &str, number: u64) -> Reply {
    let inside = Some(Duration::ZERO);
    let doing = Doing {
        entered: number,
        what: what.into(),
        number,
        inside,
    };
    connection
        .send(
            &Request::Beat {
                doing,
                overdue: false,
            }
            .encode(),
        )
        .unwrap();
    Reply::decode(&connection.frame(|| true).unwrap()).unwrap()
}

/// The failure, once this rank hears of it.
fn failure(member: &Membership) -> String {
    let began = Instant::now();
    loop {
        match member.check() {
            Err(error) => return error.to_string(),
            Ok(()) => assert!(began.elapsed() < LONG, "no failure"),
        }
        thread::sleep(Duration::from_millis(5));
    }
}

fn assert_words(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "{word:?} is not in {text:?}");
    }
}

#[test]
fn ranks_meet_exchange_agree_and_leave() {
    let job = job(4, FAST);
    scope(|scope| {
        for member in job {
            scope.spawn(move || {
                if member.rank == 1 {
                    member.set("id", &[7; 128]).unwrap();
                }
                assert_eq!(member.get("id", 1).unwrap(), [7; 128]);
                for step in 0..3 {
                    member
                        .agree("step", &[("number", step.to_string())])
                        .unwrap();
                }
                member.check().unwrap();
            });
        }
    });
}

/// Agreements leave nothing in the store but the last answer.
#[test]
fn agreements_do_not_fill_the_store() {
    let job = job(2, FAST);
    scope(|scope| {
        for member in &job {
            scope.spawn(move || {
                for step in 0..1100 {
                    let facts = [("number", step.to_string())];
                    member.agree("step", &facts).unwrap();
                }
            });
        }
    });
}

#[test]
fn a_rank_that_differs_is_named_to_all() {
    let job = job(3, FAST);
    scope(|scope| {
        for member in &job {
            scope.spawn(|| {
                let lr = if member.rank == 2 { "0.1" } else { "0.2" };
                let facts = [("seed", "1".into()), ("lr", lr.into())];
                let text = member
                    .agree("configuration", &facts)
                    .unwrap_err()
                    .to_string();
                assert_words(
                    &text,
                    &["rank 2, in configuration: lr is 0.1, and 0.2 on rank 0"],
                );
            });
        }
    });
}

#[test]
fn what_a_rank_does_not_set_is_named() {
    let job = job(2, OVERDUE);
    let text = job[0].get("nccl/id", 1).unwrap_err().to_string();
    assert_words(
        &text,
        &["rank 1, in rendezvous: has not set \"nccl/id\" within 0.3 s"],
    );
    let text = job[0]
        .set(&"k".repeat(70_000), &[])
        .unwrap_err()
        .to_string();
    assert_words(&text, &["expected at most 65536 bytes, got 70000"]);
}

#[test]
fn alone_there_is_nobody_to_wait_for() {
    let member = Membership::alone();
    member.set("a", b"b").unwrap();
    assert_eq!(member.get("a", 0).unwrap(), b"b");
    assert!(member.get("b", 0).is_err());
    let _watch = member.enter("all_reduce");
    member
        .agree("configuration", &[("seed", "1".into())])
        .unwrap();
    member.check().unwrap();
    member.fail("forward", "NaN");
    assert_words(&failure(&member), &["rank 0, in forward: NaN"]);
}

#[test]
fn a_stranger_disturbs_nobody() {
    let mut strangers = Vec::new();
    let job = join(2, 2, LONG, FAST, |master| {
        for words in [
            "",
            "GET / HTTP/1.1\r\n\r\n",
            "tallow-store/1 x\n",
            "\u{0}\n",
            &"x".repeat(100_000),
        ] {
            let mut stream = TcpStream::connect((master.0.as_str(), master.1)).unwrap();
            let _ = std::io::Write::write_all(&mut stream, words.as_bytes());
            strangers.push(stream);
        }
    });
    for member in job.iter().flatten() {
        member.set("key", b"value").unwrap();
    }
    assert_eq!(job.iter().flatten().count(), 2);
    // Those that said something wrong are closed without an answer.
    for stream in &mut strangers[1..] {
        stream.set_read_timeout(Some(LONG)).unwrap();
        let answer = std::io::Read::read(stream, &mut [0; 64]);
        assert!(matches!(&answer, Ok(0)) || answer.is_err(), "{answer:?}");
    }
}
