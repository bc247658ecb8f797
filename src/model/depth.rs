//! The stack that deep graphs need: candle walks and drops a graph recursively.

use crate::{Error, Result};
use std::panic::resume_unwind;
use std::thread;

/// The stack of a block in backward, in bytes. Optimized builds need 0.8 KiB with the whole graph and 2.7 KiB with
/// checkpointed segments, whose op has an edge for each weight; this is three times as much, for other builds.
const BYTES_A_BLOCK: usize = 8 << 10;

/// The stack that any thread is assumed to have: smaller needs are not checked.
const ANY_STACK_BYTES: usize = 512 << 10;

/// Returns an error if a graph would overflow this thread's stack in backward or when it is dropped.
pub(super) fn check(blocks: usize) -> Result<()> {
    let wanted_bytes = blocks.saturating_mul(BYTES_A_BLOCK);
    if wanted_bytes <= ANY_STACK_BYTES {
        return Ok(());
    }
    let left_bytes = left_bytes().unwrap_or(ANY_STACK_BYTES);
    if wanted_bytes <= left_bytes {
        return Ok(());
    }
    let most = left_bytes / BYTES_A_BLOCK;
    let expected =
        format!("at most {most} where a graph is kept, for {left_bytes} bytes of stack are left");
    let hint = format!(
        "backward recurses through the graph: call it on a thread of {wanted_bytes} bytes and more \
         (std::thread::Builder::stack_size), or plan the step (compile::Step)"
    );
    Err(Error::config("TransformerConfig", "num_layers", blocks).must_be(expected, hint))
}

/// Calls `f`, which builds a graph of `blocks` blocks, on a new thread if the stack of this one is too small.
pub(crate) fn with_stack<T: Send>(
    blocks: usize,
    f: impl FnOnce() -> Result<T> + Send,
) -> Result<T> {
    let Err(refused) = check(blocks) else {
        return f();
    };
    let bytes = ANY_STACK_BYTES.saturating_add(blocks.saturating_mul(BYTES_A_BLOCK));
    thread::scope(|scope| {
        let thread = thread::Builder::new().stack_size(bytes);
        match thread.spawn_scoped(scope, f) {
            Ok(thread) => thread.join().unwrap_or_else(|panic| resume_unwind(panic)),
            Err(_) => Err(refused),
        }
    })
}

/// Returns the bytes left on this thread's stack.
#[cfg(target_os = "linux")]
fn left_bytes() -> Option<usize> {
    let here = std::hint::black_box(0u8);
    let mut start = std::ptr::null_mut();
    let mut size = 0;
    // SAFETY: the attributes are initialized by the first call, read by the second, and destroyed by the third.
    let found = unsafe {
        let mut attributes: libc::pthread_attr_t = std::mem::zeroed();
        if libc::pthread_getattr_np(libc::pthread_self(), &mut attributes) != 0 {
            return None;
        }
        let found = libc::pthread_attr_getstack(&attributes, &mut start, &mut size);
        libc::pthread_attr_destroy(&mut attributes);
        found == 0
    };
    found.then(|| (&raw const here as usize).saturating_sub(start as usize))
}

/// Returns the bytes left on this thread's stack.
#[cfg(target_vendor = "apple")]
fn left_bytes() -> Option<usize> {
    let here = std::hint::black_box(0u8);
    // SAFETY: asks about this thread.
    let (end, size) = unsafe {
        let thread = libc::pthread_self();
        (
            libc::pthread_get_stackaddr_np(thread) as usize,
            libc::pthread_get_stacksize_np(thread),
        )
    };
    Some((&raw const here as usize).saturating_sub(end - size))
}

/// Returns `None`: unknown on this platform.
#[cfg(not(any(target_os = "linux", target_vendor = "apple")))]
fn left_bytes() -> Option<usize> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stack_decides() {
        let on_stack = |bytes: usize, blocks: usize| {
            let thread = std::thread::Builder::new().stack_size(bytes);
            thread.spawn(move || check(blocks)).unwrap().join().unwrap()
        };
        on_stack(4 << 20, 50).unwrap();
        on_stack(4 << 20, 480).unwrap();
        let error = on_stack(4 << 20, 513).unwrap_err().to_string();
        assert!(error.contains("num_layers must be at most"), "{error}");
        on_stack(5 << 20, 513).unwrap();
        on_stack(4 << 20, usize::MAX).unwrap_err();
    }
}
