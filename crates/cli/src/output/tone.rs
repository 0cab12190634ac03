//! How good a state is, to be shown by a colour.

/// What its colour says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tone {
    Good,
    /// It is as it was asked for, or will pass.
    Calm,
    /// Somebody has to do something.
    Bad,
}
