//! Test hooks between two changes of files, which inspect the folder or fail the next change.

use std::io;
use std::path::Path;

/// Called before each change of `path`: creation of its temporary file, replacement, removal. Does nothing outside of
/// tests.
#[cfg(not(test))]
pub(super) fn point(_path: &Path) -> io::Result<()> {
    Ok(())
}

#[cfg(test)]
pub(super) fn point(path: &Path) -> io::Result<()> {
    HOOK.with_borrow_mut(|hook| hook.as_mut().map_or(Ok(()), |hook| hook(path)))
}

#[cfg(test)]
type Hook = Box<dyn FnMut(&Path) -> io::Result<()>>;

#[cfg(test)]
thread_local! {
    static HOOK: std::cell::RefCell<Option<Hook>> = const { std::cell::RefCell::new(None) };
}

/// Runs `run`; every change of files on this thread first calls `hook`, and fails with its error.
#[cfg(test)]
pub(crate) fn with_hook<T>(
    hook: impl FnMut(&Path) -> io::Result<()> + 'static,
    run: impl FnOnce() -> T,
) -> T {
    HOOK.set(Some(Box::new(hook)));
    let result = run();
    HOOK.set(None);
    result
}
