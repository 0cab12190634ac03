//! The handshake round xl's stream, and which host has the domain when a connection is cut.
//!
//! `xl migrate` at the source and `xl migrate-receive` at the destination exchange fixed texts:
//!
//! | | direction | text | then |
//! | --- | --- | --- | --- |
//! | 1 | back | [banner](Answer::Banner) | xl sends the stream |
//! | 2 | back | [ready](Answer::Ready) | xl renames its domain, which is suspended |
//! | 3 | forward | [permission](PermissionReader) | the receiver renames its copy and unpauses it |
//! | 4 | back | [report](Answer::Report), status 0 | xl destroys its domain |
//! | | | another status | the receiver has destroyed its copy |
//! | 5 | back, after a failure | [handed back](Answer::HandedBack) | xl resumes its domain |
//!
//! xl has no time-outs. If its transport ends before 2, xl resumes its domain by itself; after 2 it
//! never does, and the domain runs nowhere if the receiver did not get 3. So the agents do not pass
//! these texts as bytes. The source's keeps 3 until the destination's agent has answered that it is
//! there, and then asks, by any connection, until it knows whether the copy runs. If it does not,
//! and never will, xl gets 4 and 5 as from a receiver that has failed, and resumes its domain.
//!
//! | connection cut | the source's agent | the domain is |
//! | --- | --- | --- |
//! | before 2 was given to xl | closes xl's pipes | the source's |
//! | before the destination answered that it is there | answers failure when xl has written 3 | the source's |
//! | later | asks: what the destination answers, xl gets | the destination's if it delivered 3, otherwise the source's |
//!
//! [`source::Machine`] and [`destination::Machine`] take an `Event` and return `Action`s in order,
//! without I/O. They survive cut connections and exited processes, but not a restarted agent: they
//! keep no journal. `tests/cuts` visits every state that they reach together.

mod answer;
pub mod destination;
pub mod source;

use std::num::NonZeroU8;

pub use answer::{Answer, AnswerReader, PERMISSION, PermissionReader, UnexpectedByte};

/// The status that an agent reports for a failure of its own, libxl's ERROR_FAIL. xl prints it.
pub const FAILED: NonZeroU8 = NonZeroU8::new(3).unwrap();

/// A message to the destination's agent. Each may be lost, and may be repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Request {
    /// Is the copy complete, and waiting for the permission?
    Check,
    /// The domain is the destination's: deliver the permission, or answer that it never will be.
    Permission,
    /// The domain is and stays the source's.
    Cancel,
}

/// A message to the source's agent. Each may be lost, and may be repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reply {
    /// The receiver is ready for the stream.
    Banner,
    /// The receiver has the domain.
    Ready,
    /// The copy is complete, and waits for the permission.
    Present,
    /// The copy runs.
    Runs,
    /// The copy never ran, and is destroyed.
    Refused {
        /// The receiver's status, or [`FAILED`].
        status: NonZeroU8,
    },
}
