//! Panics on purpose, for tests: only with the feature `faults`, which no program
//! that is built for use has.

/// A place where the thread that comes to it panics if `DROVEWAY_PANIC_AT` has its
/// name, or the beginning of it.
#[cfg(feature = "faults")]
pub(crate) fn point() {
    use std::sync::OnceLock;
    static AT: OnceLock<Option<String>> = OnceLock::new();
    let wanted = AT.get_or_init(|| std::env::var("DROVEWAY_PANIC_AT").ok());
    let Some(wanted) = wanted else { return };
    let thread = std::thread::current();
    if thread.name().is_some_and(|name| name.starts_with(wanted)) {
        panic!("DROVEWAY_PANIC_AT has this thread");
    }
}

#[cfg(not(feature = "faults"))]
pub(crate) fn point() {}
