//! A stand-in for xl, its libraries and Xen: the program `fake-xl`, with those of xl's commands that
//! migrations and agents use.
//!
//! A domain is a directory of its host, with the memory that it wrote, which [`Memory::wrong`]
//! checks. Both hosts append to one file where a domain runs and where it stops ([`Life`]).
//! Handshake and failures follow xl 4.17: it has no time-outs, resumes a domain by itself only
//! until the receiver is ready, and a receiver that can't report exits before it has destroyed its
//! copy. A test has the program wait, fail or end at named [points](Act).

mod commands;
mod life;
mod memory;
mod points;
mod receiver;
mod sender;
mod store;
mod stream;

pub use commands::run;
pub use life::Life;
pub use memory::Memory;
pub use points::Act;
pub use store::{Domain, State, Store, uuid};
pub use stream::made_up;
