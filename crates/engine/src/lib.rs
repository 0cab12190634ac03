//! One migration: the source's side ([`migrate`]), the destination's side
//! ([`serve`]), their phases and the report.

#![forbid(unsafe_code)]

mod caught;
mod destination;
mod error;
mod examine;
mod host;
mod link;
mod network;
mod orders;
mod predict;
mod report_builder;
mod resources;
mod source;
mod tail;
mod waits;
mod watch;
mod xen;

pub use crate::host::{
    Arriving, FixedCost, HandOver, Host, Local, NotAlone, Peer, RamBack, Refusal, SourceVm,
    Unsettled, UnsettledDomain,
};
pub use crate::xen::{ArrivingDomain, DepartingDomain, XenHost, XlPipes, domain_of};
pub use content::{Domain, Estimate, Sample, Tally};
pub use destination::{KnownHosts, SameHost, Server, serve};
pub use error::MigrationError;
pub use examine::{ExamineError, Examined, examine, paths};
pub use orders::Orders;
pub use predict::{predict, used, used_pages, used_private};
pub use resources::{Buffers, BuffersFull, Resources};
pub use source::carried::{
    Caller, Carried, CarriedEnd, CarryRequest, Content, More, Opening, Relay, Split,
};
pub use source::xen::{DepartedDomain, OfferedDomain};
pub use source::{Migrated, Settlement, migrate};
pub use transport::{Endpoint, LaneError};
pub use waits::Waits;
pub use watch::Watch;
