//! The words of a command line, for a QEMU that can't be queried over QMP.

use serde_json::Value;

use crate::command_line::{pieces, value};

/// QEMU's command line.
#[derive(Clone, Copy, Debug)]
pub(super) struct Words<'a>(pub(super) &'a [String]);

/// The argument of an option: JSON, or `a,b=c`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Argument<'a>(pub(super) &'a str);

impl<'a> Words<'a> {
    /// The arguments of all options of that name, in order.
    pub(super) fn all(self, option: &'a str) -> impl DoubleEndedIterator<Item = Argument<'a>> {
        let is_it = move |word: &String| {
            let word = word.strip_prefix('-');
            word.is_some_and(|word| word.strip_prefix('-').unwrap_or(word) == option)
        };
        let follows =
            move |pair: &'a [String]| is_it(&pair[0]).then_some(Argument(pair[1].as_str()));
        self.0.windows(2).filter_map(follows)
    }

    /// The argument of the last option of that name, which counts for QEMU.
    pub(super) fn last(self, option: &'a str) -> Option<Argument<'a>> {
        self.all(option).next_back()
    }
}

impl<'a> Argument<'a> {
    /// One of its properties. A first piece without a key is its `driver`; for options
    /// whose first key is another one, see [`Argument::first`].
    pub(super) fn get(self, key: &str) -> Option<String> {
        value(self.0, key)
    }

    /// Its first piece, if that has no key.
    pub(super) fn first(self) -> Option<String> {
        pieces(self.0).into_iter().next().filter(|first| !first.contains('='))
    }

    /// The argument as a JSON object, if it is one.
    pub(super) fn json(self) -> Option<Value> {
        serde_json::from_str(self.0).ok().filter(Value::is_object)
    }
}
