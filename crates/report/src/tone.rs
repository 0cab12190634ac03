//! The tone of a state, which is shown as a colour.

/// How good a state is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tone {
    /// As it should be.
    Good,
    /// As requested, or temporary.
    Calm,
    /// The operator has to act.
    Bad,
}
