//! Panics on purpose, for tests: only with the feature `faults`, which no program
//! that is built for use has.

/// A place that a thread that carries data comes to again and again. It panics there
/// once if the file that `DROVEWAY_PANIC_FILE` names has its name, or the beginning of
/// it; the file is gone then.
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
    // Of several threads of such a name, the one that takes the file.
    if is_it && std::fs::remove_file(file).is_ok() {
        panic!("DROVEWAY_PANIC_FILE has the name of this thread");
    }
}

/// Nothing.
#[cfg(not(feature = "faults"))]
#[inline]
pub fn point() {}
