//! `droveway doctor`: whether this host is fit for migrations, and whether its VMs can move to
//! another.
//!
//! The examiner gathers facts here, queries other agents for theirs, and answers their questions.
//! The crate `doctor` judges the facts.

mod recent;
pub(crate) mod sight;
pub(crate) mod vms;

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use api::{ErrorCode, Examination, Finding};
use doctor::{LaneMet, Meeting, Unmet};
use engine::{Endpoint, ExamineError, Examined, LaneError, Local, Peer};
use facts::host::{Cgroups, Facts, Kvm, Network, Program, VmFacts};
use host::nic;
use identity::Security;
use qemu::environment;
use qemu::probe::Probes;
use qemu::room::host_memory;
use wire::examine::{Answer, FILLER_BYTES, PROGRAMS_MAX, Question, Reached, TAPS_MAX};
use wire::{Part, Reply};

use crate::config::{Carry, NicSpeed, Password};
use crate::denied::Denied;
use crate::parallel::at_once;
use crate::peers::Routes;
use crate::vms::registry::Registry;
use recent::Recent;

/// For an answer that takes no work.
const GREETING_MAX: Duration = Duration::from_secs(5);
/// For an answer for which an agent may have to ask several QEMUs.
const FACTS_MAX: Duration = Duration::from_secs(60);
/// The program that is examined even if no VM uses it, unless the agent can't see KVM.
const QEMU: &str = "qemu-system-x86_64";
/// What to do about a peer that answers, but not as this agent understands it.
const SAME_VERSION: &str =
    "is that the address of its agent? Run the same version of Droveway there";

/// Examines this host, alone or paired with another.
pub(crate) struct Examiner {
    registry: Arc<Registry>,
    local: Local,
    routes: Routes,
    listen: SocketAddr,
    nic_speeds: Vec<NicSpeed>,
    carry: Option<Carry>,
    passwords: Vec<Password>,
    probes: Probes,
    /// The VMs here, for other hosts.
    vms: Recent<Vec<VmFacts>>,
}

impl Examiner {
    pub(crate) fn new(
        registry: Arc<Registry>,
        local: Local,
        routes: Routes,
        listen: SocketAddr,
        nic_speeds: Vec<NicSpeed>,
        carry: Option<Carry>,
        passwords: Vec<Password>,
    ) -> Self {
        let probes = Probes::new(Arc::clone(&local.programs)).kept_in(registry.state().probes());
        let vms = Recent::default();
        Self { registry, local, routes, listen, nic_speeds, carry, passwords, probes, vms }
    }

    /// The QEMU programs and their capabilities.
    pub(crate) fn probes(&self) -> &Probes {
        &self.probes
    }

    pub(crate) fn local(&self) -> &Local {
        &self.local
    }

    /// The total speed of the NICs that lanes use, in bytes per second.
    pub(crate) fn carries(&self) -> Result<u64, Denied> {
        let speeds: Option<Vec<u64>> =
            self.nics().into_iter().map(|nic| nic.speed_bytes_per_s).collect();
        speeds.filter(|speeds| !speeds.is_empty()).map(|speeds| speeds.iter().sum()).ok_or_else(
            || {
                Denied::Invalid(
                    "this host's network cards don't report their speed: give the bandwidth with \
                     --rate, or the speed with the agent's --nic-speed"
                        .to_owned(),
                )
            },
        )
    }

    /// Examines this host, and whether its peers answer.
    pub(crate) fn examine_host(&self) -> Examination {
        let mut findings = doctor::of_host(&self.facts(self.ask_vms(), &[], &[]));
        findings.extend(self.greet_peers());
        Examination { of: self.local.agent.clone(), findings }
    }

    /// Examines whether the VMs here can move to a peer.
    pub(crate) fn examine_pair(&self, name: &str) -> Result<Examination, Denied> {
        let peer = self.peer(name)?;
        let of = format!("{} -> {name}", self.local.agent);
        let meeting = match self.meet(&peer) {
            Ok(meeting) => meeting,
            Err(unmet) => return Ok(Examination { findings: vec![silent(&of, name, &unmet)], of }),
        };
        let here = self.facts(self.ask_vms(), &[], &[]);
        let taps = here.vms.iter().flat_map(|vm| &vm.taps).take(TAPS_MAX).cloned().collect();
        let question = Question::Facts { programs: used(&here), taps };
        let findings = match self.ask(name, direct(&peer), question, FACTS_MAX) {
            Ok(Examined { answer: Answer::Facts(there), .. }) => {
                doctor::of_pair(&here, &there, &meeting)
            }
            Ok(_) => vec![silent(&of, name, &of_other_version("the host sent no description"))],
            Err(unmet) => vec![silent(&of, name, &unmet)],
        };
        Ok(Examination { of, findings })
    }

    /// Answers another agent's question.
    pub(crate) fn answer(&self, question: Part<Question>) -> Answer {
        match question {
            Part::Read(Question::Reach { filler }) => Answer::Reached(Reached {
                host: self.local.agent.clone(),
                droveway: version(),
                at_unix_ms: now_unix_ms(),
                // The caller's own bytes, but no more than the protocol permits.
                filler: filler.chars().take(FILLER_BYTES).collect(),
            }),
            Part::Read(Question::Facts { programs, taps }) => {
                let vms = self.vms.get(|| self.ask_vms());
                Answer::Facts(Box::new(self.facts(vms, &programs, &taps)))
            }
            Part::Read(Question::Comes { target }) => {
                let manager = self.local.manager.as_ref();
                let expects = manager.map_or(Ok(false), |manager| manager.expects(&target));
                let here = expects
                    .inspect_err(|error| tracing::debug!(?target, %error, "expected"))
                    .unwrap_or(false);
                Answer::Comes { here }
            }
            Part::Read(Question::Unknown) | Part::Odd(_) => Answer::Unknown,
        }
    }

    fn ask_vms(&self) -> Vec<VmFacts> {
        vms::facts(&self.registry, &host_memory())
    }

    fn facts(&self, vms: Vec<VmFacts>, asked: &[(String, String)], taps: &[String]) -> Facts {
        let memory = host_memory();
        // An agent that carries others' migrations may lack the device that their VMs use.
        let starts_none = self.carry.is_some() && vms.is_empty();
        let kvm = match sight::kvm(self.registry.qemu_user()) {
            Kvm::Missing if starts_none && sight::kernel_has_kvm() => Kvm::Unknown,
            kvm => kvm,
        };
        let mut programs = BTreeSet::new();
        if let Some(accelerator) = in_path(&kvm) {
            programs.insert((QEMU.to_owned(), accelerator.to_owned()));
        }
        programs.extend(vms.iter().map(|vm| (vm.program.clone(), vm.accelerator.clone())));
        // A name that is not one of this host's programs gets an error, and is not started.
        programs.extend(asked.iter().take(PROGRAMS_MAX).cloned());
        let nics = self.nics();
        let now = SystemTime::now();
        let certificate = match &self.local.security {
            Security::Tls(identity) => Some(identity),
            Security::Plaintext | Security::Within(_) => None,
        };
        Facts {
            host: self.local.agent.clone(),
            droveway: version(),
            wire: wire::VERSION,
            kernel: sight::kernel(),
            clock_source: sight::clock_source(),
            tsc: (kvm == Kvm::Usable).then(sight::tsc).flatten(),
            kvm,
            qemu_user: sight::qemu_user(self.registry.qemu_user()),
            cgroups: Cgroups { forbidden: self.local.quota_notes.is_none(), ..sight::cgroups() },
            reach: sight::reach(),
            carries: self.carry.as_ref().map(|carry| sight::carries(carry, &nics)),
            nics,
            memory,
            shared_huge_pages: sight::shared_huge_pages(),
            state: sight::state(self.registry.state().path()),
            network: Network {
                listen: self.listen.to_string(),
                loopback: self.listen.ip().is_loopback(),
                plaintext: self.routes.insecure_plaintext,
                certificate: certificate.and_then(|one| one.warning(now)),
                certificate_refused: certificate.is_some_and(|one| one.validity().is_refused(now)),
            },
            exposed: self.passwords.iter().filter_map(Password::exposure).collect(),
            programs: programs.into_iter().map(|one| self.program(one)).collect(),
            vms,
            left_over: self.registry.left_over(),
            environment: environment::own(),
            taps: taps.iter().take(TAPS_MAX).map(|tap| (tap.clone(), sight::tap(tap))).collect(),
        }
    }

    fn program(&self, (name, accelerator): (String, String)) -> Program {
        let (known, problem) = match self.probes.of(&name, Path::new("/"), &accelerator) {
            Ok(known) => (Some((*known).clone()), None),
            Err(error) => (None, Some(error.to_string())),
        };
        Program { name, accelerator, known, problem }
    }

    fn nics(&self) -> Vec<facts::host::Nic> {
        let mut addresses = self.local.nics.clone();
        if addresses.is_empty() && !self.listen.ip().is_unspecified() {
            addresses.push(self.listen.ip());
        }
        if addresses.is_empty() {
            let peers = self.routes.peers.now();
            let routes = peers.iter().map(|peer| nic::local_towards(peer.address));
            addresses = routes.flatten().collect::<BTreeSet<IpAddr>>().into_iter().collect();
        }
        addresses.into_iter().map(|address| sight::nic(address, &self.nic_speeds)).collect()
    }

    fn greet_peers(&self) -> Vec<Finding> {
        let peers = self.routes.peers.now();
        let met = at_once(&peers, |entry| {
            let peer = Peer { name: entry.name.clone(), address: entry.address, nics: Vec::new() };
            self.greet(&peer.name, direct(&peer))
        });
        let found = peers.iter().zip(met).map(|(peer, met)| {
            doctor::of_peer(&self.local.agent, &version(), &peer.name, met.as_ref())
        });
        found.collect()
    }

    /// Greets a peer on each path that a lane can take.
    fn meet(&self, peer: &Peer) -> Result<Meeting, Unmet> {
        let mut meeting = self.greet(&peer.name, direct(peer))?;
        let paths = engine::paths(&self.local, peer);
        let greet = |path: &Endpoint| match self.greet(&peer.name, *path) {
            Ok(meeting) => Ok(meeting.round_trip),
            Err(Unmet { why, .. }) => Err(why),
        };
        let met = at_once(&paths, greet);
        let lanes = paths.iter().zip(met);
        meeting.lanes =
            lanes.map(|(path, outcome)| LaneMet { path: path.to_string(), outcome }).collect();
        Ok(meeting)
    }

    fn greet(&self, peer: &str, path: Endpoint) -> Result<Meeting, Unmet> {
        let asked_at_unix_ms = now_unix_ms();
        let question = Question::Reach { filler: "-".repeat(FILLER_BYTES) };
        match self.ask(peer, path, question, GREETING_MAX)? {
            Examined { answer: Answer::Reached(reached), took: round_trip } => {
                let reached = Reached { filler: String::new(), ..reached };
                Ok(Meeting { round_trip, asked_at_unix_ms, reached, lanes: Vec::new() })
            }
            _ => Err(of_other_version("this version cannot examine that host")),
        }
    }

    fn ask(
        &self,
        peer: &str,
        path: Endpoint,
        question: Question,
        within: Duration,
    ) -> Result<Examined, Unmet> {
        engine::examine(&self.local, peer, path, question, within).map_err(|error| unmet(&error))
    }

    pub(crate) fn peer(&self, name: &str) -> Result<Peer, Denied> {
        if name == self.local.agent {
            return Err(Denied::Invalid(format!("{name} is this host: leave its name out")));
        }
        let entry = self.routes.peers.named(name).ok_or_else(|| {
            let text = format!("there is no host `{name}` in the peers file");
            Denied::Coded(ErrorCode::NoSuchHost, text)
        })?;
        Ok(Peer { name: entry.name, address: entry.address, nics: entry.nics })
    }
}

/// The accelerator with which the program in PATH would run a VM, if that is known.
fn in_path(kvm: &Kvm) -> Option<&'static str> {
    match kvm {
        Kvm::Unknown => None,
        Kvm::Usable => Some("kvm"),
        Kvm::Missing | Kvm::Denied(_) => Some("tcg"),
    }
}

/// Without an answer, nothing else is known of a pair.
fn silent(of: &str, name: &str, Unmet { why, advice }: &Unmet) -> Finding {
    Finding {
        host: of.to_owned(),
        about: "peer".to_owned(),
        severity: api::Severity::Error,
        text: format!("{name} can't be queried: {why}."),
        advice: Some((*advice).to_owned()),
    }
}

fn of_other_version(why: &str) -> Unmet {
    Unmet { why: why.to_owned(), advice: SAME_VERSION }
}

/// Why a peer gave no answer, and what to do: only one that is silent may be down.
fn unmet(error: &ExamineError) -> Unmet {
    let advice = match error {
        ExamineError::Refused(_) => {
            "its agent answers, and refuses: correct the peers file there, which should be the \
             same on all hosts"
        }
        ExamineError::Connect(LaneError::Handshake { .. }) => {
            "correct what the reason names: a certificate, a clock, or --insecure-plaintext"
        }
        ExamineError::Connect(LaneError::Turned { reply: Reply::Busy, .. }) => {
            "its agent answers, and is busy or stopping: try again"
        }
        ExamineError::Connect(LaneError::Bind { .. }) => "correct `nic` in the agent's file here",
        ExamineError::Connect(LaneError::Turned { .. } | LaneError::Wire(_))
        | ExamineError::HungUp
        | ExamineError::OutOfTurn => SAME_VERSION,
        ExamineError::Connect(_) | ExamineError::Broken(_) => {
            "is its agent running, and does the firewall allow the connection?"
        }
    };
    Unmet { why: error.to_string(), advice }
}

/// The programs that the VMs of a host use, with their accelerators.
fn used(facts: &Facts) -> Vec<(String, String)> {
    let used = facts.vms.iter().map(|vm| (vm.program.clone(), vm.accelerator.clone()));
    used.collect::<BTreeSet<_>>().into_iter().take(PROGRAMS_MAX).collect()
}

/// The path of control connections.
fn direct(peer: &Peer) -> Endpoint {
    Endpoint { local: None, remote: peer.address }
}

fn version() -> String {
    env!("CARGO_PKG_VERSION").to_owned()
}

fn now_unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::io;

    use identity::{CertificateProblem, HandshakeError};

    use super::*;

    #[test]
    fn the_advice_is_about_what_keeps_the_peer_from_answering() {
        let remote = "10.0.0.2:7800".parse().unwrap();
        let refused = ExamineError::Refused("host-a is not in the peers file of host-b".to_owned());
        let down = io::ErrorKind::ConnectionRefused.into();
        let expired = HandshakeError::from(CertificateProblem::Expired("1970-01-01".to_owned()));
        for (error, says) in [
            (refused, "correct the peers file there"),
            (LaneError::Connect { remote, source: down }.into(), "is its agent running"),
            (LaneError::Handshake { remote, source: expired }.into(), "a certificate"),
            (LaneError::Turned { remote, reply: Reply::Busy }.into(), "try again"),
            (ExamineError::HungUp, "the same version"),
        ] {
            let finding = silent("host-a -> host-b", "host-b", &unmet(&error));
            let advice = finding.advice.unwrap();
            assert!(finding.text.contains(&error.to_string()));
            assert!(advice.contains(says), "{error}: {advice}");
            let is_down = says == "is its agent running";
            assert_eq!(advice.contains("agent running"), is_down, "{error}: {advice}");
        }
    }

    #[test]
    fn without_a_sight_of_kvm_the_program_in_path_is_left_out() {
        assert_eq!(in_path(&Kvm::Usable), Some("kvm"));
        assert_eq!(in_path(&Kvm::Missing), Some("tcg"));
        assert_eq!(in_path(&Kvm::Denied("no".to_owned())), Some("tcg"));
        assert_eq!(in_path(&Kvm::Unknown), None);
    }
}
