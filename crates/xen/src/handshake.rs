//! The handshake round xl's stream.
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
//! these texts as bytes: the switchover's machines decide, with their journals. To the source's, 3
//! is the completion of the migration. The destination delivers it once the domain was given up. If
//! the copy never runs, xl gets 4 and 5 as from a receiver that has failed, and resumes its domain.
//! `tests/cuts` visits every state that xl, both agents and the receiver reach together.

mod answer;

use std::num::NonZeroU8;

pub use answer::{Answer, AnswerReader, PERMISSION, PermissionReader, UnexpectedByte};

/// The status that an agent reports for a failure of its own, libxl's ERROR_FAIL. xl prints it.
pub const FAILED: NonZeroU8 = NonZeroU8::new(3).unwrap();
