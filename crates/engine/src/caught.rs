//! Work that is followed by cleaning up, whether it returns or panics.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::thread;

/// How work ended.
#[must_use = "a panic goes on only in `or_go_on`, and counts in `into_returned`"]
pub(crate) struct Caught<T>(thread::Result<T>);

/// Works, and returns also if that panics.
pub(crate) fn caught<T>(work: impl FnOnce() -> T) -> Caught<T> {
    Caught(catch_unwind(AssertUnwindSafe(work)))
}

impl<T> Caught<T> {
    /// None if it panicked.
    pub(crate) fn returned(&self) -> Option<&T> {
        self.0.as_ref().ok()
    }

    /// What it returned; none if it panicked, which is in the log.
    pub(crate) fn into_returned(self) -> Option<T> {
        self.0.ok()
    }

    /// What it returned; a panic goes on.
    pub(crate) fn or_go_on(self) -> T {
        self.0.unwrap_or_else(|panic| resume_unwind(panic))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_goes_on_after_what_is_to_follow() {
        let worked = caught(|| 7);
        assert_eq!(worked.returned(), Some(&7));
        assert_eq!(worked.or_go_on(), 7);
        let mut followed = false;
        let panicked = caught(|| {
            let worked = caught(|| -> u32 { panic!("on purpose") });
            followed = worked.returned().is_none();
            worked.or_go_on()
        });
        assert!(panicked.returned().is_none() && followed);
        assert_eq!(panicked.into_returned(), None);
    }
}
