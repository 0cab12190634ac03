//! Panics on purpose, for tests. Only with the feature `faults`, which no released program has.

/// A place that a data thread passes again and again. The thread panics there once if the file that
/// `DROVEWAY_PANIC_FILE` names contains the thread's name or the beginning of it, and removes the
/// file.
#[cfg(feature = "faults")]
pub fn point() {
    use std::path::PathBuf;
    use std::sync::OnceLock;
    static FILE: OnceLock<Option<PathBuf>> = OnceLock::new();
    let Some(file) = FILE.get_or_init(|| std::env::var_os("DROVEWAY_PANIC_FILE").map(Into::into))
    else {
        return;
    };
    let Ok(wanted) = std::fs::read_to_string(file) else { return };
    let thread = std::thread::current();
    let is_it = !wanted.is_empty() && thread.name().is_some_and(|name| name.starts_with(&wanted));
    // If several threads match, the one that removes the file panics.
    if is_it && std::fs::remove_file(file).is_ok() {
        panic!("DROVEWAY_PANIC_FILE has the name of this thread");
    }
}

/// Does nothing without the feature `faults`.
#[cfg(not(feature = "faults"))]
#[inline]
pub fn point() {}
