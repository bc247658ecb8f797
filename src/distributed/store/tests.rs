use super::*;
use crate::Error;
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(20);

fn serve() -> Server {
    let listener = listen(&("localhost".into(), 0)).unwrap();
    Server::start(listener, "a token\nof two lines", 4, LONG).unwrap()
}

fn hello(rank: usize) -> Hello {
    Hello::new(Purpose::Store, rank, 4, "a token\nof two lines")
}

fn refusal(server: &Server, hello: &Hello) -> String {
    let began = Instant::now();
    match connect(&server.master(), hello, LONG) {
        Err(error @ Error::Order { .. }) => {
            assert!(began.elapsed() < LONG / 2, "a refusal is not tried again");
            error.to_string()
        }
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("{hello:?} is let in"),
    }
}

#[test]
fn those_of_another_job_are_refused() {
    let server = serve();
    let refused = |hello: &Hello, words: &str| {
        let text = refusal(&server, hello);
        assert!(
            text.contains(words) && !text.contains("of two lines"),
            "{text}"
        );
    };
    refused(
        &Hello::new(Purpose::Store, 1, 4, "b"),
        "refuses rank 1: the job's token is another",
    );
    refused(
        &Hello::new(Purpose::Store, 1, 5, "a token\nof two lines"),
        "a world size of 4, and this rank 5",
    );
    let old = Hello {
        version: "0.0.1".into(),
        ..hello(1)
    };
    refused(&old, "this rank 0.0.1");

    let first = connect(&server.master(), &hello(1), LONG).ok().unwrap();
    refused(&hello(1), "rank 1 is already there");
    drop(first);
    let beat = Hello {
        purpose: Purpose::Heartbeat,
        ..hello(1)
    };
    let first = connect(&server.master(), &beat, LONG).ok().unwrap();
    drop(first);
    refused(&beat, "rank 1 is already there"); // it has ended, and the job with it
}

/// Without the token nothing is done: no place is taken, no value set, no failure declared, and no answer tells more.
#[test]
fn a_stranger_can_do_nothing() {
    let server = serve();
    let failure = Failure::new(2, "nothing", "declared by a stranger", LEFT);
    let set = Request::Set {
        key: "key".into(),
        value: vec![1],
    };
    for token in ["", "a token\nof two line", "a token\nof two lines "] {
        for purpose in [Purpose::Store, Purpose::Heartbeat] {
            let mut hello = Hello::new(purpose, 1, 9, token);
            hello.version = "0.0.1".into();
            let (host, port) = server.master();
            let stream = std::net::TcpStream::connect((host, port)).unwrap();
            let mut stranger = Connection::new(stream, LONG).unwrap();
            stranger.send_line(&hello.line()).unwrap();
            let _ = stranger.send(&set.encode());
            let _ = stranger.send(&Request::Fail(failure.clone()).encode());
            let answer = stranger.line(|| true);
            if let Ok(answer) = answer {
                assert_eq!(answer, "refused: the job's token is another");
            }
            assert!(stranger.line(|| true).is_err(), "it is closed");
        }
    }
    let client = Client::new(connect(&server.master(), &hello(1), LONG).unwrap());
    assert_eq!(client.missing(&|| Ok(())).unwrap(), [0, 1, 2, 3]);
    client.set("mine", &[2], &|| Ok(())).unwrap();
    let absent = client.get("key", &|| {
        Err(Error::Plot("asked once".into())) // it is not there
    });
    assert!(matches!(absent, Err(Error::Plot(_))), "{absent:?}");
}

#[test]
fn a_rank_that_stores_too_much_is_refused() {
    let server = serve();
    let client = Client::new(connect(&server.master(), &hello(1), LONG).unwrap());
    let go_on = || Ok(());
    let value = vec![0; (16 << 20) - (64 << 10)];
    for key in ["0", "1"] {
        client.set(key, &value, &go_on).unwrap();
    }
    let error = client.set("2", &value, &go_on).unwrap_err().to_string();
    let words = "value of \"2\": expected at most 1024 values and 33554432 bytes of a rank";
    assert!(error.contains(words), "{error}");
    assert!(client.take("0", &go_on).unwrap() == value);
    client.set("2", &value, &go_on).unwrap();
    for number in 0..1021 {
        client.set(&format!("small {number}"), &[], &go_on).unwrap();
    }
    client.set("small", &[], &go_on).unwrap();
    assert!(client.set("too many", &[], &go_on).is_err());
}

#[test]
fn a_store_that_is_not_there_is_waited_for_and_named() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let master = ("127.0.0.1".to_string(), free.local_addr().unwrap().port());
    // One that takes connections and says nothing.
    let error = connect(&master, &hello(1), Duration::from_millis(100))
        .err()
        .unwrap()
        .to_string();
    let words = format!(
        "rank 0, in rendezvous: its store does not answer at 127.0.0.1:{} for 0.1 s",
        master.1
    );
    assert!(error.contains(&words), "{error}");
    drop(free);

    std::thread::scope(|scope| {
        let late = scope.spawn(|| connect(&master, &hello(1), LONG));
        std::thread::sleep(Duration::from_millis(100));
        let _server =
            Server::start(listen(&master).unwrap(), "a token\nof two lines", 4, LONG).unwrap();
        let client = Client::new(late.join().unwrap().ok().unwrap());
        let value = vec![3; 16 << 20]; // the largest
        client.set("key", &value, &|| Ok(())).unwrap();
        assert!(client.get("key", &|| Ok(())).unwrap() == value);
    });
}

#[test]
fn messages_are_read_as_written_and_nothing_else_is() {
    let doing = Doing {
        entered: 3,
        what: "all_reduce".into(),
        number: 2,
        inside: Some(LONG),
    };
    let failure = Failure::new(1, &doing, "ß".repeat(10_000), LEFT);
    assert!(failure.problem.len() < 10_000);
    let requests = [
        Request::Set {
            key: "k".into(),
            value: vec![1, 2],
        },
        Request::Get { key: "k".into() },
        Request::Take { key: "k".into() },
        Request::Missing,
        Request::Beat {
            doing: doing.clone(),
            overdue: true,
        },
        Request::Fail(failure.clone()),
        Request::Goodbye(doing),
    ];
    for request in requests {
        let frame = request.encode();
        assert_eq!(Request::decode(&frame).as_ref(), Some(&request));
        assert!((0..frame.len()).all(|end| Request::decode(&frame[..end]).is_none()));
        assert_eq!(Request::decode(&[&frame[..], &[0]].concat()), None);
    }
    let replies = [
        Reply::Done,
        Reply::Value(vec![5]),
        Reply::Absent,
        Reply::Full("at most 2".into()),
        Reply::Missing(vec![1, 3]),
        Reply::Failed(failure),
        Reply::Left { entered: 9 },
    ];
    for reply in replies {
        let frame = reply.encode();
        assert_eq!(Reply::decode(&frame).as_ref(), Some(&reply));
        assert!((0..frame.len()).all(|end| Reply::decode(&frame[..end]).is_none()));
    }
    let endless = [b"m".as_slice(), &u64::MAX.to_le_bytes()].concat();
    assert_eq!(Reply::decode(&endless), None);
}
