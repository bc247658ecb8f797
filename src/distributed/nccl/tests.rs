use super::*;
use crate::distributed::collective::Reduce;
use rstest::rstest;
use std::ffi::c_char;
use std::sync::Condvar;

/// The calls of a mock NCCL without a GPU. A communicator is a pointer to one.
#[derive(Default)]
struct Log {
    calls: Mutex<Vec<String>>,
    changed: Condvar,
}

impl Log {
    fn of(comm: Comm) -> &'static Self {
        // SAFETY: a communicator of `comm_init_rank_config` below.
        unsafe { &*comm.cast::<Self>() }
    }

    fn add(&self, call: String) -> Code {
        self.calls.lock().unwrap().push(call);
        self.changed.notify_all();
        0
    }

    fn wait_for(&self, wanted: &str) -> Vec<String> {
        let calls = self.calls.lock().unwrap();
        let missing = |calls: &mut Vec<String>| !calls.iter().any(|call| call == wanted);
        self.changed.wait_while(calls, missing).unwrap().clone()
    }
}

extern "C" fn get_version(version: *mut c_int) -> Code {
    // SAFETY: a pointer from `Nccl::load`.
    unsafe { *version = 22000 };
    0
}

extern "C" fn get_error_string(_: Code) -> *const c_char {
    c"a failure".as_ptr()
}

extern "C" fn get_last_error(_: Comm) -> *const c_char {
    c"the last one\n".as_ptr()
}

extern "C" fn get_unique_id(_: *mut UniqueId) -> Code {
    3
}

/// The first byte of the id is the number of milliseconds that it takes.
extern "C" fn comm_init_rank_config(
    comm: *mut Comm,
    _: c_int,
    id: UniqueId,
    _: c_int,
    _: *mut Config,
) -> Code {
    thread::sleep(Duration::from_millis(id.0[0].into()));
    // SAFETY: a pointer from `NcclBackend::with`.
    unsafe { *comm = Box::into_raw(Box::<Log>::default()).cast() };
    id.0[1].into()
}

extern "C" fn comm_get_async_error(_: Comm, state: *mut Code) -> Code {
    // SAFETY: a pointer from `NcclBackend::async_error`.
    unsafe { *state = 6 };
    0
}

extern "C" fn comm_abort(comm: Comm) -> Code {
    Log::of(comm).add("abort".into())
}

extern "C" fn comm_destroy(comm: Comm) -> Code {
    Log::of(comm).add("destroy".into())
}

extern "C" fn group_start() -> Code {
    0
}

extern "C" fn group_end() -> Code {
    0
}

/// On a null stream it hangs until it is aborted.
extern "C" fn all_reduce(
    from: Pointer,
    into: Pointer,
    count: usize,
    of: c_int,
    with: c_int,
    comm: Comm,
    stream: *mut c_void,
) -> Code {
    Log::of(comm).add(format!("all_reduce {from} {into} {count} {of} {with}"));
    if stream.is_null() {
        Log::of(comm).wait_for("abort");
        return 2;
    }
    0
}

macro_rules! collectives {
    ($($name:ident($($argument:ident: $type:ty),*);)*) => {$(
        extern "C" fn $name($($argument: $type,)* comm: Comm, _: *mut c_void) -> Code {
            let arguments = [$($argument.to_string()),*].join(" ");
            Log::of(comm).add(format!("{} {arguments}", stringify!($name)))
        }
    )*};
}

collectives! {
    reduce(from: Pointer, into: Pointer, count: usize, of: c_int, with: c_int, root: c_int);
    reduce_scatter(from: Pointer, into: Pointer, count: usize, of: c_int, with: c_int);
    all_gather(from: Pointer, into: Pointer, count: usize, of: c_int);
    broadcast(from: Pointer, into: Pointer, count: usize, of: c_int, root: c_int);
}

static DOUBLE: Nccl = Nccl {
    get_version,
    get_error_string,
    get_last_error,
    get_unique_id,
    comm_init_rank_config,
    comm_get_async_error,
    group_start,
    group_end,
    comm_abort,
    comm_destroy,
    all_reduce,
    reduce,
    reduce_scatter,
    all_gather,
    broadcast,
};

fn of(rank: usize, world_size: usize) -> Shard {
    Shard { rank, world_size }
}

/// Begins as rank 1 of 3.
fn begin(id: &[u8], max_ctas: Option<u32>, patience: Duration) -> Result<NcclBackend> {
    let began = Instant::now();
    let check = || match began.elapsed() < patience {
        true => Ok(()),
        false => Err(Error::Plot("too late".into())),
    };
    NcclBackend::with(
        &DOUBLE,
        of(1, 3),
        &hexadecimal(id),
        max_ctas,
        || Ok(()),
        &check,
    )
}

fn begun() -> (NcclBackend, &'static Log) {
    let nccl = begin(&[0; 128], None, Duration::MAX).unwrap();
    let log = Log::of(nccl.communicator.load(Ordering::Relaxed));
    (nccl, log)
}

const SUM: Collective = Collective::AllReduce(Reduce::Sum);

fn stream() -> *mut c_void {
    ptr::dangling_mut()
}

#[rstest]
#[case(SUM, DType::F32, "all_reduce 1000 1000 6 7 0")]
#[case(
    Collective::AllReduce(Reduce::Mean),
    DType::BF16,
    "all_reduce 1000 1000 6 9 4"
)]
#[case(
    Collective::AllReduce(Reduce::Max),
    DType::F64,
    "all_reduce 1000 1000 6 8 2"
)]
#[case(
    Collective::ReduceScatter(Reduce::Sum),
    DType::F16,
    "reduce_scatter 1000 1004 2 6 0"
)]
#[case(Collective::AllGather, DType::I64, "all_gather 1016 1000 2 4")]
#[case(Collective::Broadcast { root: 2 }, DType::U32, "broadcast 1000 1000 6 3 2")]
#[case(Collective::Reduce { reduce: Reduce::Mean, root: 1 }, DType::BF16, "reduce 1000 1000 6 9 4 1")]
fn collectives_are_in_place(
    #[case] collective: Collective,
    #[case] dtype: DType,
    #[case] call: &str,
) {
    let (nccl, log) = begun();
    nccl.run(collective, 1000, 6, dtype, stream()).unwrap();
    nccl.run(SUM, 0, 0, DType::F32, stream()).unwrap();
    drop(nccl);
    assert_eq!(*log.calls.lock().unwrap(), [call, "destroy"]);
}

#[rstest]
#[case(Collective::AllGather, DType::F32, "elements that 3 ranks divide")]
#[case(SUM, DType::I64, "to be reduced, got i64")]
fn what_cannot_be_is_refused(
    #[case] collective: Collective,
    #[case] dtype: DType,
    #[case] words: &str,
) {
    let (nccl, log) = begun();
    let refused = nccl.run(collective, 1000, 7, dtype, stream());
    let text = refused.unwrap_err().to_string();
    assert!(text.contains(words), "{text}");
    assert!(log.calls.lock().unwrap().is_empty());
}

#[test]
fn nothing_is_called_after_an_abort() {
    let (nccl, log) = begun();
    nccl.abort();
    nccl.abort();
    assert_eq!(log.wait_for("abort"), ["abort"]);
    let refused = [
        nccl.run(SUM, 8, 1, DType::F32, stream()),
        nccl.async_error(),
    ];
    for refused in refused {
        let text = refused.unwrap_err().to_string();
        assert!(text.contains("NCCL was aborted"), "{text}");
    }
    drop(nccl);
    assert_eq!(*log.calls.lock().unwrap(), ["abort"]);
}

#[test]
fn an_abort_ends_a_call_that_hangs() {
    let (nccl, log) = begun();
    thread::scope(|scope| {
        let hangs = scope.spawn(|| nccl.run(SUM, 8, 1, DType::F32, ptr::null_mut()));
        log.wait_for("all_reduce 8 8 1 7 0");
        nccl.async_error().unwrap(); // it does not wait
        nccl.abort();
        let text = hangs.join().unwrap().unwrap_err().to_string();
        let words = "rank 1, in all_reduce: NCCL answers a failure (the last one);";
        assert!(text.contains(words), "{text}");
    });
}

/// Returns an id that takes some milliseconds, and its result code.
fn id(milliseconds: u8, code: u8) -> [u8; 128] {
    let mut id = [0; 128];
    [id[0], id[1]] = [milliseconds, code];
    id
}

#[rstest]
#[case(&id(200, 0), None, "too late")]
#[case(&id(0, 1), None, "in the beginning of NCCL: NCCL answers a failure")]
#[case(&[0; 127], None, "expected an id of 128 bytes, got 127")]
#[case(&[0; 128], Some(0), "nccl_max_ctas must be from 1")]
#[case(&[0; 128], Some(u32::MAX), "nccl_max_ctas must be from 1")]
fn what_cannot_begin_is_told(
    #[case] id: &[u8],
    #[case] max_ctas: Option<u32>,
    #[case] words: &str,
) {
    let begun = begin(id, max_ctas, Duration::from_millis(30));
    let text = begun.err().unwrap().to_string();
    assert!(text.contains(words), "{text}");
}

#[test]
fn what_fails_is_told() {
    let (nccl, _) = begun();
    let text = nccl.async_error().unwrap_err().to_string();
    assert!(text.contains("NCCL answers a failure"), "{text}");
    let (place, id) = (of(0, 1), hexadecimal(&[0; 128]));
    let unbound = || Err(Error::Plot("no context".into()));
    let unbound = NcclBackend::with(&DOUBLE, place, &id, None, unbound, &|| Ok(()));
    assert_eq!(unbound.err().unwrap().to_string(), "plot: no context");
}
