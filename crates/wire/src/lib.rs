//! The protocol between two agents, as bytes: no sockets, no threads.
//!
//! A connection opens with a [`Preamble`] that tells its kind: the control connection of a
//! migration, one of its lanes, an [`Inquiry`] about a switchover after that connection was lost,
//! [`Order`]s of a gang, requests to the directory of a rack, or content from another host.
//!
//! - control: [`Frame`]s; most carry one message as JSON ([`ToDestination`], [`ToSource`]), the
//!   others pieces of the non-RAM stream.
//! - lane: from the source [`BatchHeader`]s with their tables and bodies, [`BlockHeader`]s with
//!   their extents and data, and [`NamedHeader`]s with names; from the destination [`Ack`]s and
//!   [`Answer`]s.
//! - content: [`ContentRequest`]s from the connecting host, [`HasHeader`]s with names and content
//!   from the other.
//!
//! Everything read here comes from a peer: lengths and counts are capped before memory is allocated
//! or a loop runs by them. docs/PROTOCOL.md describes the whole protocol.

#![forbid(unsafe_code)]

mod batch;
mod block;
pub mod carry;
mod control;
mod domain;
mod error;
pub mod examine;
mod fetch;
#[doc(hidden)]
pub mod fuzzing;
pub mod gang;
mod inquiry;
mod named;
mod order;
mod part;
mod preamble;
mod read;

pub use batch::{Ack, BatchHeader, FILLS_MAX, Payload, Tables};
pub use block::{BlockHeader, LaneHeader, SEQUENCES_AHEAD_MAX};
pub use control::{
    Announced, AuditOrder, Cost, Frame, FrameHeader, Late, Prepare, Prepared, SharingOrder,
    StorageOrder, ToDestination, ToSource, read_frame, read_message,
};
pub use domain::ReceiveDomain;
pub use error::WireError;
pub use fetch::{ContentRequest, HasHeader};
pub use inquiry::{Inquiry, SwitchoverMessage};
pub use named::{Answer, DiskLocation, NamedHeader, NamedTables, Names};
pub use order::Order;
pub use part::Part;
pub use preamble::{Kind, Preamble, Reply, Token, VERSION, Versions};
