//! How a coordinator reaches agents: others over the network, its own directly.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use api::{BitRate, ErrorCode};
use engine::{Orders, Peer};

use super::evacuations::Evacuations;
use super::order_handler::OrderHandler;
use super::sampled::{self, Content};
use crate::denied::Denied;
use wire::gang::{Answer, Census, Counted, Order, VmNeeds};

/// For an answer that needs some QEMUs' state.
///
/// It is also the most time that a host that hangs costs a gang, apart from retries.
pub(super) const ANSWER_MAX: Duration = Duration::from_secs(15);
/// For an answer that may need the start of several QEMUs to probe their capabilities.
const ABLE_MAX: Duration = Duration::from_secs(60);
/// The longest text that is kept from another host.
const TEXT_LETTERS_MAX: usize = 1024;

/// All agents that this one can reach.
#[derive(Clone)]
pub(super) struct Agents(Arc<OrderHandler>);

/// A session with one agent.
pub(super) enum Session {
    Near(Arc<OrderHandler>),
    Far(Orders),
}

/// The queries of a coordinator to the cluster; tests have a stand-in.
pub(super) trait Cluster: Sync {
    /// The name of this host.
    fn here(&self) -> &str;
    /// The racks of all hosts, including this one, by the host's name.
    fn racks(&self) -> BTreeMap<String, Option<String>>;
    /// What gangs may use of each rack's uplink, in each direction, for racks where that is bounded.
    fn uplinks(&self) -> BTreeMap<String, BitRate>;
    /// The memory and VMs of a host.
    fn census(&self, host: &str) -> Result<Census, String>;
    /// For each VM, why the host can't run it; none if it can.
    fn able(&self, host: &str, needs: Vec<VmNeeds>) -> Result<Vec<Option<String>>, String>;
    /// A sample of the content of each of these VMs of a host, one name in `one_in`.
    fn contents(&self, host: &str, vms: &[Counted], one_in: u32) -> Vec<Result<Content, String>>;
}

/// The agents as one move needs them; tests have a stand-in.
pub(super) trait Reach {
    type Session: Give;
    /// Opens a session with the agent of a host.
    fn open(&self, host: &str) -> Result<Self::Session, Unreached>;
    /// The memory and VMs of a host.
    fn census(&self, host: &str) -> Result<Census, String>;
}

/// A session in which orders are given.
pub(super) trait Give {
    /// Gives an order; after an error the session can't be used any more.
    fn give(&mut self, order: &Order, within: Duration) -> Result<Answer, String>;
}

/// Why there is no session with an agent.
#[derive(Clone, Debug)]
pub(super) struct Unreached {
    pub(super) why: String,
    pub(super) cause: Cause,
}

/// What keeps an agent from taking a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cause {
    /// It does not answer: it may be starting anew.
    Silence,
    /// It answers that it is busy.
    Busy,
    /// What does not pass by itself.
    Lasting,
}

impl From<Unreached> for String {
    fn from(Unreached { why, .. }: Unreached) -> Self {
        why
    }
}

impl Agents {
    pub(super) fn new(order_handler: &Arc<OrderHandler>) -> Self {
        Self(Arc::clone(order_handler))
    }

    pub(super) fn evacuations(&self) -> &Evacuations {
        self.0.evacuations()
    }

    fn once(&self, host: &str, order: &Order, within: Duration) -> Result<Answer, String> {
        self.open(host)?.give(order, within)
    }
}

impl Reach for Agents {
    type Session = Session;

    fn open(&self, host: &str) -> Result<Session, Unreached> {
        if host == self.0.local().agent {
            return Ok(Session::Near(Arc::clone(&self.0)));
        }
        let unknown = || {
            let why = format!("there is no host `{host}` in the peers file");
            Unreached { why, cause: Cause::Lasting }
        };
        let entry = self.0.peers().named(host).ok_or_else(unknown)?;
        let peer = Peer { name: entry.name, address: entry.address, nics: Vec::new() };
        Orders::open(self.0.local(), &peer).map(Session::Far).map_err(|error| {
            let cause = match (error.may_pass(), error.is_busy()) {
                (false, _) => Cause::Lasting,
                (true, true) => Cause::Busy,
                (true, false) => Cause::Silence,
            };
            Unreached { why: error.to_string(), cause }
        })
    }

    fn census(&self, host: &str) -> Result<Census, String> {
        Cluster::census(self, host)
    }
}

impl Give for Session {
    fn give(&mut self, order: &Order, within: Duration) -> Result<Answer, String> {
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
    fn here(&self) -> &str {
        &self.0.local().agent
    }

    fn racks(&self) -> BTreeMap<String, Option<String>> {
        let peers = self.0.peers().now();
        let peers = peers.iter().map(|peer| (peer.name.clone(), peer.rack.clone()));
        std::iter::once((self.0.local().agent.clone(), self.0.rack())).chain(peers).collect()
    }

    fn uplinks(&self) -> BTreeMap<String, BitRate> {
        let own = self.0.rack().zip(self.0.uplink());
        let peers = self.0.peers().now();
        let others = peers.iter().filter_map(|peer| Some((peer.rack.clone()?, peer.uplink?)));
        own.into_iter().chain(others).collect()
    }

    fn census(&self, host: &str) -> Result<Census, String> {
        match self.once(host, &Order::Census, ANSWER_MAX)? {
            Answer::Census(census) => Ok(census),
            answer => Err(unexpected(answer)),
        }
    }

    fn able(&self, host: &str, needs: Vec<VmNeeds>) -> Result<Vec<Option<String>>, String> {
        match self.once(host, &Order::Able { needs }, ABLE_MAX)? {
            Answer::Able { unfit } => Ok(unfit),
            answer => Err(unexpected(answer)),
        }
    }

    fn contents(&self, host: &str, vms: &[Counted], one_in: u32) -> Vec<Result<Content, String>> {
        if vms.is_empty() {
            return Vec::new();
        }
        let mut session = self.open(host).map_err(String::from);
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

/// One VM's content, as its host's agent reports it.
fn content(answer: Answer, vm: &Counted, one_in: u32) -> Result<Content, String> {
    match answer {
        Answer::Sample(sampled) => {
            let understood = sampled::understood(&sampled, vm.ram_bytes, one_in);
            understood.ok_or_else(|| "the answer of its agent contradicts itself".to_owned())
        }
        answer => Err(unexpected(answer)),
    }
}

/// The error for an answer that does not match the order.
pub(super) fn unexpected(answer: Answer) -> String {
    match answer {
        Answer::Refused { reason, .. } => reason,
        _ => "its version does not support such orders".to_owned(),
    }
}

/// Sanitizes another host's answer, which is shown to people and saved.
fn clean(answer: &mut Answer) {
    match answer {
        Answer::Refused { reason, .. } => *reason = plain(reason),
        Answer::Able { unfit } => unfit.iter_mut().flatten().for_each(|why| *why = plain(why)),
        Answer::Census(census) => {
            // Names become parts of requests and output.
            census.vms.retain(|vm: &Counted| identity::check_name(&vm.name).is_ok());
            census.evacuating.retain(|host| identity::check_name(host).is_ok());
            let ids = census.vms.iter_mut().filter_map(|vm| vm.migration.as_mut());
            ids.for_each(|id| *id = plain(id));
            for one in &mut census.moving {
                (one.id, one.vm, one.to) = (plain(&one.id), plain(&one.vm), plain(&one.to));
                one.notes.clear();
            }
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
        // A sample is checked when it is parsed.
        Answer::Sample(_)
        | Answer::Started
        | Answer::Set
        | Answer::Cancelling
        | Answer::NoSuch
        | Answer::Unknown => {}
    }
}

fn plain(text: &str) -> String {
    let letters = text.chars().take(TEXT_LETTERS_MAX);
    letters.map(|letter| if letter.is_control() { ' ' } else { letter }).collect()
}

/// The error for the caller if another host's agent can't be queried.
pub(super) fn silent(host: &str, why: &str) -> Denied {
    Denied::Coded(ErrorCode::HostSilent, format!("the agent of {host} can't be queried: {why}"))
}
