//! Why pages are not read from storage: said to those whom it concerns.
//!
//! Reading from storage is on by default, and most guests have no helper. A report
//! that gives a reason each time would only be noise. So by default notes are kept
//! back until the helper has answered: from then on they tell its owner what is
//! missing.

use api::ReadDisks;
use parking_lot::Mutex;

pub(super) struct StorageNotes {
    report: Box<dyn Fn(String) + Send + Sync>,
    /// None once they go to the report at once.
    kept_back: Mutex<Option<Vec<String>>>,
}

impl StorageNotes {
    pub(super) fn new(read: ReadDisks, report: impl Fn(String) + Send + Sync + 'static) -> Self {
        let kept_back = (read == ReadDisks::Auto).then(Vec::new);
        Self { report: Box::new(report), kept_back: Mutex::new(kept_back) }
    }

    pub(super) fn note(&self, note: impl Into<String>) {
        let note = note.into();
        match &mut *self.kept_back.lock() {
            Some(kept_back) => {
                tracing::debug!(note, "kept back: nobody asked for pages from storage");
                kept_back.push(note);
            }
            None => (self.report)(note),
        }
    }

    /// There is a helper in the guest.
    pub(super) fn helper_answers(&self) {
        let kept_back = self.kept_back.lock().take();
        kept_back.into_iter().flatten().for_each(&self.report);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn notes(read: ReadDisks) -> (Arc<Mutex<Vec<String>>>, StorageNotes) {
        let reported = Arc::<Mutex<Vec<String>>>::default();
        let report = Arc::clone(&reported);
        (reported, StorageNotes::new(read, move |note| report.lock().push(note)))
    }

    #[test]
    fn by_default_a_guest_without_a_helper_is_no_news() {
        let (reported, notes) = notes(ReadDisks::Auto);
        notes.note("no helper");
        assert!(reported.lock().is_empty());
        notes.helper_answers();
        notes.note("a disk can't be read");
        notes.helper_answers();
        assert_eq!(*reported.lock(), ["no helper", "a disk can't be read"]);
    }

    #[test]
    fn whoever_asks_is_told_at_once() {
        let (reported, notes) = notes(ReadDisks::On);
        notes.note("no helper");
        assert_eq!(*reported.lock(), ["no helper"]);
    }
}
