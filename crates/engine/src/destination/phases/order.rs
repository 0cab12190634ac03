//! The first message of a connection: an order for a VM, or a question.

use std::time::Duration;

use wire::carry::Carry;
use wire::{Prepare, ReceiveDomain, ToDestination, ToSource};

use super::connect::Connected;
use super::end::End;
use crate::link::Received;

/// The longest time between connecting and the order.
const ORDER_MAX: Duration = Duration::from_secs(10);

/// An order of another agent.
pub(super) enum Order {
    /// Prepare for a VM.
    Prepare(Box<Prepare>),
    /// Carry a VM that another manager moves.
    Carry(Box<Carry>),
    /// Receive a domain of Xen.
    Domain(Box<ReceiveDomain>),
}

impl Connected<'_> {
    /// The order; none if another agent only sent a question, which is answered.
    pub(super) fn receive_order(&self) -> Result<Option<Order>, End> {
        match self.inbox.recv_timeout(ORDER_MAX) {
            Ok(Received::Message(ToDestination::Prepare(order))) => Ok(Some(Order::Prepare(order))),
            Ok(Received::Message(ToDestination::Carry(order))) => Ok(Some(Order::Carry(order))),
            Ok(Received::Message(ToDestination::ReceiveDomain(order))) => {
                Ok(Some(Order::Domain(order)))
            }
            Ok(Received::Message(ToDestination::Examine { question })) => {
                self.check_listed()?;
                let answer = self.shared.host.examine(question);
                // If the answer can't be sent, the peer no longer waits for it.
                let _ = self.link.send(&ToSource::Examined { answer });
                Ok(None)
            }
            Ok(Received::Disconnected(error)) => Err(End::Over(error.to_string())),
            Ok(_) => Err(End::failed("an order to prepare was expected first")),
            Err(_) => Err(End::Over("no order arrived".to_owned())),
        }
    }

    /// With certificates, a host can't order in another host's name, nor one that was removed.
    pub(super) fn check_from(&self, from: &str) -> Result<(), End> {
        match &self.certified {
            Some(certified) if certified != from => Err(End::failed(format!(
                "the order is from {from}, and the certificate of its sender is for {certified}"
            ))),
            _ => self.check_listed(),
        }
    }

    fn check_listed(&self) -> Result<(), End> {
        let here = &self.shared.local.agent;
        match self.shared.not_listed(self.certified.as_deref()) {
            Some(host) => Err(End::failed(format!("{host} is not in the peers file of {here}"))),
            None => Ok(()),
        }
    }
}
