//! The words of a command line, for what can't be asked over QMP.

use serde_json::Value;

use crate::command_line::{pieces, value};

/// A command line of QEMU's.
#[derive(Clone, Copy, Debug)]
pub(super) struct Words<'a>(pub(super) &'a [String]);

/// What follows an option: JSON, or `a,b=c`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Argument<'a>(pub(super) &'a str);

impl<'a> Words<'a> {
    /// What follows each such option, in order.
    pub(super) fn all(self, option: &'a str) -> impl DoubleEndedIterator<Item = Argument<'a>> {
        let is_it = move |word: &String| {
            let word = word.strip_prefix('-');
            word.is_some_and(|word| word.strip_prefix('-').unwrap_or(word) == option)
        };
        let follows =
            move |pair: &'a [String]| is_it(&pair[0]).then_some(Argument(pair[1].as_str()));
        self.0.windows(2).filter_map(follows)
    }

    /// What follows the last such option, as QEMU takes it.
    pub(super) fn last(self, option: &'a str) -> Option<Argument<'a>> {
        self.all(option).next_back()
    }
}

impl<'a> Argument<'a> {
    /// One of its properties; of a driver, type or size that stands alone the key is
    /// implied by who asks.
    pub(super) fn get(self, key: &str) -> Option<String> {
        value(self.0, key)
    }

    /// Its first piece, if that has no key.
    pub(super) fn first(self) -> Option<String> {
        pieces(self.0).into_iter().next().filter(|first| !first.contains('='))
    }

    /// As JSON, if it is.
    pub(super) fn json(self) -> Option<Value> {
        serde_json::from_str(self.0).ok().filter(Value::is_object)
    }
}
