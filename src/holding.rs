//! What holds on a thread while a function runs.

/// Runs `f` while `value` is in a thread's cell, of which `replace` puts one in and returns the other. The former holds
/// again afterwards, on panic too.
pub(crate) fn holding<T, R>(replace: impl Fn(T) -> T, value: T, f: impl FnOnce() -> R) -> R {
    struct Restore<T, F: Fn(T) -> T> {
        former: Option<T>,
        replace: F,
    }
    impl<T, F: Fn(T) -> T> Drop for Restore<T, F> {
        fn drop(&mut self) {
            self.former.take().map(&self.replace);
        }
    }
    let former = Some(replace(value));
    let _restore = Restore { former, replace };
    f()
}
