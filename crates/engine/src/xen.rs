//! Domains of Xen, which `xl migrate` sends and `xl migrate-receive` receives: what the decisions
//! of a switchover are for xl.
//!
//! | decision | [`DepartingDomain`] | [`ArrivingDomain`] |
//! | --- | --- | --- |
//! | is it released? | xl gets "ready"; it writes its permission | |
//! | it runs there | | the receiver gets the permission, and reports |
//! | it stays | xl gets a report of failure, or its pipes are closed | the receiver's input is closed, and no copy is left |
//! | it has left | xl gets a report of success, and destroys it | |
//!
//! Whatever xl and its receiver do, or don't, the domain is found by its UUID.

mod arriving;
mod departing;
mod pipes;
mod receiver;

use std::sync::Arc;

use managers::xen::{MovingDomain, Xl};
use serde_json::{Value, json};
use switchover::journal::{JournalDir, Opened};

pub use arriving::ArrivingDomain;
pub use departing::DepartingDomain;
pub(crate) use pipes::FromXl;
pub use pipes::XlPipes;
pub(crate) use receiver::{Heard, Receiver};

/// This host's settings for domains of Xen.
#[derive(Debug)]
pub struct XenHost {
    /// Xen's tool.
    pub xl: Arc<Xl>,
    /// The journals of their switchovers.
    pub journals: JournalDir,
    /// The hosts whose domains are accepted.
    pub accept_from: Vec<String>,
}

/// A domain as its journal notes it, next to its name.
pub(crate) fn noted(domain: &MovingDomain) -> Value {
    json!({ "domain": domain.uuid })
}

/// The domain of a journal; none if it is of another kind of VM.
#[must_use]
pub fn domain_of(opened: &Opened) -> Option<MovingDomain> {
    let uuid = opened.qemu.get("domain")?.as_str().filter(|uuid| xen::is_uuid(uuid))?.to_owned();
    Some(MovingDomain { name: opened.vm.clone(), uuid })
}
