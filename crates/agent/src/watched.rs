//! When a file that is watched is read: once it has changed and is whole, when the operator says
//! so, and again and again while it can't be used.

/// Files, by a stamp that a change of them changes.
pub(crate) struct Watched<S> {
    used: S,
    /// At the last check, when the files may have been half written.
    seen: S,
    /// Why they can't be used. The cause may pass without a change of the files' times: a file that
    /// could not be read, or a key that every user could read, only gets another mode.
    refused: Option<String>,
}

impl<S: Copy + PartialEq> Watched<S> {
    /// Files that are in use as they are now.
    pub(crate) fn new(now: S) -> Self {
        Self { used: now, seen: now, refused: None }
    }

    /// Whether the files are to be read.
    pub(crate) fn look(&mut self, now: S, is_told: bool) -> bool {
        let is_whole = now == self.seen;
        self.seen = now;
        let is_read = is_told || (is_whole && (now != self.used || self.refused.is_some()));
        if is_read {
            self.used = now;
        }
        if is_told {
            // The caller is notified of it once more.
            self.refused = None;
        }
        is_read
    }

    /// They were read, and are used.
    pub(crate) fn accept(&mut self) {
        self.refused = None;
    }

    /// They were read, and can't be used; they are tried again. Returns whether the reason is to be
    /// told: it is new.
    pub(crate) fn refuse(&mut self, why: &str) -> bool {
        let is_new = self.refused.as_deref() != Some(why);
        self.refused = Some(why.to_owned());
        is_new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_once_it_is_whole_or_when_told() {
        let mut watched = Watched::new(Some(1));
        let looks = [
            (Some(1), false, false),
            (Some(2), false, false),
            (Some(3), false, false),
            (Some(3), false, true),
            (Some(3), false, false),
            (Some(3), true, true),
            // It is about to be replaced.
            (None, false, false),
            (Some(4), true, true),
            (Some(4), false, false),
            // It is gone.
            (None, false, false),
            (None, false, true),
            (None, false, false),
        ];
        for (nth, (now, is_told, expected)) in looks.into_iter().enumerate() {
            assert_eq!(watched.look(now, is_told), expected, "{nth}");
        }
    }

    #[test]
    fn one_that_cannot_be_used_is_tried_again_and_each_reason_told_once() {
        let mut watched = Watched::new(1);
        assert!(!watched.look(2, false) && watched.look(2, false));
        assert!(watched.refuse("no permission"));
        for (is_told, is_new) in [(false, false), (true, true), (false, false)] {
            assert!(watched.look(2, is_told));
            assert_eq!(watched.refuse("no permission"), is_new);
        }
        assert!(watched.look(2, false) && watched.refuse("nonsense in line 3"));
        // While it is written.
        assert!(!watched.look(3, false));
        assert!(watched.look(3, false));
        watched.accept();
        assert!(!watched.look(3, false));
    }
}
