//! One switchover of a domain, on either side.

use std::collections::VecDeque;

use engine::{ArrivingDomain, DepartingDomain};
use managers::xen::XlError;
use switchover::{destination, source};
use wire::SwitchoverMessage;

use crate::moves::recovery::either_side::EitherSide;

pub(super) type Case = EitherSide<DepartingDomain, ArrivingDomain>;

impl Case {
    /// Takes the messages to send to the other side.
    pub(super) fn take_messages(&mut self) -> VecDeque<SwitchoverMessage> {
        match self {
            Self::Source(_, domain) => {
                domain.outbox.drain(..).map(SwitchoverMessage::ToDestination).collect()
            }
            Self::Destination(_, domain) => {
                domain.outbox.drain(..).map(SwitchoverMessage::ToSource).collect()
            }
        }
    }

    /// Takes how the domain's fate was decided at its source, if it just was.
    pub(super) fn take_fate(&mut self) -> Option<source::Outcome> {
        match self {
            Self::Source(_, domain) => domain.fate.take(),
            Self::Destination(_, domain) => {
                domain.fate = None;
                None
            }
        }
    }

    /// Whether the domain here is one that only its owner destroys.
    pub(super) fn is_owners(&self) -> Result<bool, XlError> {
        match self {
            Self::Source(_, domain) => domain.is_unreleased(),
            Self::Destination(_, domain) => domain.runs_here(),
        }
    }

    /// Handles a timeout.
    pub(super) fn late(&mut self) {
        match self {
            Self::Source(driver, domain) => driver.step(source::Event::Timeout, domain),
            Self::Destination(driver, domain) => driver.step(destination::Event::Timeout, domain),
        }
    }
}
