//! How a coordinator reaches agents: the others over the network, its own
//! without.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use api::ErrorCode;
use engine::{Orders, Peer};

use super::order_handler::OrderHandler;
use super::sampled::{self, Content};
use crate::denied::Denied;
use wire::gang::{Answer, Census, Counted, Order, Want};

/// For an answer that takes a look at some QEMUs. Also what a host that hangs
/// costs a gang at most, besides what it retries.
pub(super) const ANSWER_MAX: Duration = Duration::from_secs(15);
/// For one that may have to start several QEMUs to learn what they can do.
const ABLE_MAX: Duration = Duration::from_secs(60);
/// A text of another host: as much as that is kept of it.
const TEXT_LETTERS_MAX: usize = 1024;

/// All agents that this one can reach.
#[derive(Clone)]
pub(super) struct Agents(Arc<OrderHandler>);

/// A conversation with one of them.
pub(super) enum Session {
    Near(Arc<OrderHandler>),
    Far(Orders),
}

/// What a coordinator asks of the cluster; in tests a stand-in for it.
pub(super) trait Cluster: Sync {
    /// The racks of all hosts, by the host's name, this one among them.
    fn racks(&self) -> BTreeMap<String, Option<String>>;
    /// What a host has.
    fn census(&self, host: &str) -> Result<Census, String>;
    /// What speaks against each of these VMs there.
    fn able(&self, host: &str, wants: Vec<Want>) -> Result<Vec<Option<String>>, String>;
    /// What each of these VMs of a host contains, one in so many contents.
    fn contents(&self, host: &str, vms: &[Counted], one_in: u32) -> Vec<Result<Content, String>>;
}

impl Agents {
    pub(super) fn new(order_handler: &Arc<OrderHandler>) -> Self {
        Self(Arc::clone(order_handler))
    }

    /// Begins to speak with the agent of a host.
    pub(super) fn open(&self, host: &str) -> Result<Session, String> {
        if host == self.0.local().agent {
            return Ok(Session::Near(Arc::clone(&self.0)));
        }
        let entry = self.0.peers().named(host);
        let entry = entry.ok_or_else(|| format!("there is no host `{host}` in the peers file"))?;
        let peer = Peer { name: entry.name, address: entry.address, nics: Vec::new() };
        Orders::open(self.0.local(), &peer).map(Session::Far).map_err(|error| error.to_string())
    }

    fn once(&self, host: &str, order: &Order, within: Duration) -> Result<Answer, String> {
        self.open(host)?.give(order, within)
    }
}

impl Session {
    /// Gives an order. After an error the session is of no use any more.
    pub(super) fn give(&mut self, order: &Order, within: Duration) -> Result<Answer, String> {
        let orders = match self {
            Self::Near(order_handler) => return Ok(order_handler.follow(order)),
            Self::Far(orders) => orders,
        };
        let order = order.clone();
        let mut answer = orders.give(order, within).map_err(|error| error.to_string())?;
        clean(&mut answer);
        Ok(answer)
    }
}

impl Cluster for Agents {
    fn racks(&self) -> BTreeMap<String, Option<String>> {
        let peers = self.0.peers().now();
        let peers = peers.iter().map(|peer| (peer.name.clone(), peer.rack.clone()));
        std::iter::once((self.0.local().agent.clone(), self.0.rack())).chain(peers).collect()
    }

    fn census(&self, host: &str) -> Result<Census, String> {
        match self.once(host, &Order::Census, ANSWER_MAX)? {
            Answer::Census(census) => Ok(census),
            answer => Err(unexpected(answer)),
        }
    }

    fn able(&self, host: &str, wants: Vec<Want>) -> Result<Vec<Option<String>>, String> {
        match self.once(host, &Order::Able { wants }, ABLE_MAX)? {
            Answer::Able { unfit } => Ok(unfit),
            answer => Err(unexpected(answer)),
        }
    }

    fn contents(&self, host: &str, vms: &[Counted], one_in: u32) -> Vec<Result<Content, String>> {
        if vms.is_empty() {
            return Vec::new();
        }
        let mut session = self.open(host);
        let ask = |vm: &Counted| {
            let order = Order::Sample { vm: vm.name.clone(), one_in };
            match session.as_mut().map_err(|why| why.clone())?.give(&order, ANSWER_MAX) {
                Ok(answer) => content(answer, vm, one_in),
                Err(why) => {
                    session = Err(why.clone());
                    Err(why)
                }
            }
        };
        vms.iter().map(ask).collect()
    }
}

/// What one VM contains, as its host's agent says.
fn content(answer: Answer, vm: &Counted, one_in: u32) -> Result<Content, String> {
    match answer {
        Answer::Sample(sampled) => {
            let understood = sampled::understood(&sampled, vm.ram_bytes, one_in);
            understood.ok_or_else(|| "its agent's answer contradicts itself".to_owned())
        }
        answer => Err(unexpected(answer)),
    }
}

/// An answer to something else.
pub(super) fn unexpected(answer: Answer) -> String {
    match answer {
        Answer::Refused { reason } => reason,
        _ => "it is of a version that takes no such orders".to_owned(),
    }
}

/// What another host says is shown to people, and kept.
fn clean(answer: &mut Answer) {
    match answer {
        Answer::Refused { reason } => *reason = plain(reason),
        Answer::Able { unfit } => unfit.iter_mut().flatten().for_each(|why| *why = plain(why)),
        Answer::Census(census) => {
            // A name becomes part of requests, and of what is shown.
            census.vms.retain(|vm: &Counted| crate::name::check(&vm.name).is_ok());
        }
        Answer::Progress { progress, figures } => {
            progress.notes.clear();
            if let Some(api::Outcome::Failed(why)) = &mut progress.outcome {
                *why = plain(why);
            }
            if let Some(figures) = figures {
                figures.notes.truncate(64);
                figures.notes.iter_mut().for_each(|note| *note = plain(note));
            }
        }
        // A sample is understood, or not believed.
        Answer::Sample(_)
        | Answer::Started
        | Answer::Cancelling
        | Answer::NoSuch
        | Answer::Unknown => {}
    }
}

fn plain(text: &str) -> String {
    let letters = text.chars().take(TEXT_LETTERS_MAX);
    letters.map(|letter| if letter.is_control() { ' ' } else { letter }).collect()
}

/// For who asked for a gang: another host's agent does not do its part.
pub(super) fn silent(host: &str, why: &str) -> Denied {
    Denied::Coded(ErrorCode::HostSilent, format!("the agent of {host} can't be asked: {why}"))
}
