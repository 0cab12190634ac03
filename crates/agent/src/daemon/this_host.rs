//! This host, as the agents of other hosts see it: who answers which of their requests.

use std::sync::Arc;

use engine::{Arriving, Host, Refusal, Unsettled, UnsettledDomain};
use qemu::disks::GoesOn;
use switchover::MigrationId;
use wire::examine::{self, Question};
use wire::{Inquiry, Part, Prepare, SwitchoverMessage, gang};

use crate::examiner::Examiner;
use crate::gangs::OrderHandler;
use crate::moves::arrivals::Arrivals;
use crate::moves::recovery::Settlers;
use crate::peers::Peers;
use crate::xen::DomainSettlers;

/// This host as a peer of others.
pub(super) struct ThisHost {
    pub(super) arrivals: Arrivals,
    pub(super) settlers: Arc<Settlers>,
    /// None: there are no domains of Xen.
    pub(super) domains: Option<Arc<DomainSettlers>>,
    pub(super) examiner: Arc<Examiner>,
    pub(super) order_handler: Arc<OrderHandler>,
    pub(super) peers: Peers,
}

impl Host for ThisHost {
    fn receive(&self, order: &Prepare, goes_on: GoesOn<'_>) -> Result<Box<dyn Arriving>, Refusal> {
        self.arrivals.receive(order, goes_on).map_err(|denied| Refusal(denied.to_string()))
    }

    fn settle(&self, left: Unsettled) {
        self.settlers.coming(left);
    }

    fn settle_domain(&self, left: UnsettledDomain) {
        if let Some(domains) = &self.domains {
            domains.coming(left);
        }
    }

    fn take_up_domain(&self, migration: &MigrationId) {
        if let Some(domains) = &self.domains {
            domains.take_up_after_fault(migration);
        }
    }

    fn take_up(&self, vm: &str, migration: &MigrationId) -> bool {
        self.settlers.take_up_after_fault(vm, self.settlers.kept_of(migration))
    }

    fn answer(&self, inquiry: Inquiry) -> Option<SwitchoverMessage> {
        match &self.domains {
            Some(domains) if domains.knows(&inquiry.message) => domains.answer(inquiry),
            _ => self.settlers.answer(inquiry),
        }
    }

    fn admits(&self, host: &str) -> bool {
        self.peers.admit(host)
    }

    fn examine(&self, question: Part<Question>) -> examine::Answer {
        self.examiner.answer(question)
    }

    fn obey(&self, from: &str, order: &Part<gang::Order>) -> Result<gang::Answer, Refusal> {
        self.order_handler.obey(from, order).map_err(|denied| Refusal(denied.to_string()))
    }
}
