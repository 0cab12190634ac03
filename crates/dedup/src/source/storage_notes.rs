//! Notes on why pages are not read from storage, for operators whom it concerns.
//!
//! Reading from storage is on by default, and most guests have no helper. A report that gives the
//! reason each time would only be noise. So by default, notes are kept back until the helper has
//! answered. From then on they tell its owner what is missing.

use parking_lot::Mutex;

/// The notes of one migration.
pub struct StorageNotes {
    report: Box<dyn Fn(String) + Send + Sync>,
    /// Notes kept back. None once notes go straight to the report.
    kept_back: Mutex<Option<Vec<String>>>,
}

impl StorageNotes {
    /// For a migration whose operator has asked for pages from storage, or not: then notes are
    /// kept back.
    pub fn new(is_asked: bool, report: impl Fn(String) + Send + Sync + 'static) -> Self {
        let kept_back = (!is_asked).then(Vec::new);
        Self { report: Box::new(report), kept_back: Mutex::new(kept_back) }
    }

    /// Why some pages are not read.
    pub fn note(&self, note: impl Into<String>) {
        let note = note.into();
        match &mut *self.kept_back.lock() {
            Some(kept_back) => {
                tracing::debug!(note, "not reported: no pages from storage were requested");
                kept_back.push(note);
            }
            None => (self.report)(note),
        }
    }

    /// A helper in the guest has answered.
    pub(crate) fn helper_answers(&self) {
        let kept_back = self.kept_back.lock().take();
        kept_back.into_iter().flatten().for_each(&self.report);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn notes(is_asked: bool) -> (Arc<Mutex<Vec<String>>>, StorageNotes) {
        let reported = Arc::<Mutex<Vec<String>>>::default();
        let report = Arc::clone(&reported);
        (reported, StorageNotes::new(is_asked, move |note| report.lock().push(note)))
    }

    #[test]
    fn by_default_a_guest_without_a_helper_is_no_news() {
        let (reported, notes) = notes(false);
        notes.note("no helper");
        assert!(reported.lock().is_empty());
        notes.helper_answers();
        notes.note("a disk can't be read");
        notes.helper_answers();
        assert_eq!(*reported.lock(), ["no helper", "a disk can't be read"]);
    }

    #[test]
    fn requested_notes_are_reported_at_once() {
        let (reported, notes) = notes(true);
        notes.note("no helper");
        assert_eq!(*reported.lock(), ["no helper"]);
    }
}
