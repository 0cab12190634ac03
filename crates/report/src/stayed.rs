//! A VM of a gang that has not moved as far as is known, and why.

use std::fmt;

use super::sentence::full_stop;

/// The VM, and how far its move went.
pub struct Stayed<'a> {
    /// Its name.
    pub vm: &'a str,
    /// Its host before the move.
    pub from: &'a str,
    /// Its destination.
    pub to: &'a str,
    /// Whether its move was attempted.
    pub tried: bool,
    /// Why it has not moved; none if that is not known.
    pub reason: Option<&'a str>,
    /// Whether it may be at either host.
    pub in_doubt: bool,
}

impl fmt::Display for Stayed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { vm, from, to, tried, reason, in_doubt } = self;
        let why = reason.map_or_else(|| "no reason is known.".to_owned(), full_stop);
        if *in_doubt {
            write!(f, "{vm} is in doubt: {why}")
        } else if *tried {
            write!(f, "{vm} was not moved from {from} to {to}: {why}")
        } else {
            write!(f, "{vm} stays at {from}: {why}")
        }
    }
}
