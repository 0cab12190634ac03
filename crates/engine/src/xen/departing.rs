//! A domain that leaves this host: what a source's decisions are for xl.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use managers::xen::{Domain, DomainState, MovingDomain, Xl, XlError};
use switchover::source::{Effects, Event, Outcome};
use switchover::{Doubt, Envelope, Found, Reason, ToDestination};
use xen::handshake::{Answer, FAILED, PermissionReader};

use super::pipes::{FromXl, XlPipes};

/// xl resumes a domain, or destroys it, and exits: it has scripts of disks and network cards to
/// wait for.
const EXIT_MAX: Duration = Duration::from_secs(60);
/// Until a domain that xl resumes runs.
const RESUMED_MAX: Duration = Duration::from_secs(20);
/// xl reports nothing, so this is the interval between queries.
const LOOK: Duration = Duration::from_millis(500);

/// A domain that leaves.
#[derive(Debug)]
pub struct DepartingDomain {
    xl: Arc<Xl>,
    domain: MovingDomain,
    /// None: they were not handed over, or are closed.
    pipes: Option<Arc<XlPipes>>,
    /// Whether xl may have "ready": since then it resumes its domain only if that is handed back,
    /// and not if its pipes are closed.
    offered: bool,
    /// Until when its pipes may be handed over again, after a restart of the agent.
    pipes_until: Option<Instant>,
    /// Until when xl may write its permission, once it has "ready".
    release_max: Duration,
    /// Why it stays, for xl's transport.
    reason: String,
    host: String,
    /// What to send, in order.
    pub outbox: VecDeque<Envelope<ToDestination>>,
    /// Its fate, once that is decided.
    pub fate: Option<Outcome>,
}

impl DepartingDomain {
    /// A domain that moves to `host`, whose xl has these pipes.
    #[must_use]
    pub fn new(
        xl: &Arc<Xl>,
        domain: MovingDomain,
        host: &str,
        pipes: Arc<XlPipes>,
        release_max: Duration,
    ) -> Self {
        Self {
            xl: Arc::clone(xl),
            domain,
            pipes: Some(pipes),
            offered: false,
            pipes_until: None,
            release_max,
            reason: "the migration has failed; its report has the reason".to_owned(),
            host: host.to_owned(),
            outbox: VecDeque::new(),
            fate: None,
        }
    }

    /// A domain whose agent has restarted. xl's transport has `pipes_max` to hand over the pipes
    /// again.
    #[must_use]
    pub fn after_restart(
        xl: &Arc<Xl>,
        domain: MovingDomain,
        host: &str,
        offered: bool,
        pipes_max: Duration,
    ) -> Self {
        Self {
            xl: Arc::clone(xl),
            domain,
            pipes: None,
            offered,
            pipes_until: Some(Instant::now() + pipes_max),
            release_max: Duration::ZERO,
            reason: "the agent was restarted".to_owned(),
            host: host.to_owned(),
            outbox: VecDeque::new(),
            fate: None,
        }
    }

    /// xl's transport has handed over the pipes again.
    pub fn take_pipes(&mut self, pipes: XlPipes) {
        self.pipes = Some(Arc::new(pipes));
        self.pipes_until = None;
    }

    /// Whether its pipes may still be handed over again.
    #[must_use]
    pub fn awaits_pipes(&self) -> bool {
        self.pipes_until.is_some_and(|until| Instant::now() < until)
    }

    /// Why the domain stays, for xl's transport.
    pub fn stays_because(&mut self, reason: &str) {
        reason.clone_into(&mut self.reason);
    }

    /// The state of the domain after a restart of the agent.
    ///
    /// # Errors
    /// If it is not known.
    pub fn found(&self) -> Result<Found, XlError> {
        Ok(match self.xl.leaving(&self.domain)? {
            None => Found::Missing,
            Some(domain) if self.runs(&domain) => Found::Runs,
            Some(_) => Found::Stopped,
        })
    }

    /// Whether it is here under its own name: then only its owner destroys it.
    ///
    /// # Errors
    /// If it is not known.
    pub fn is_unreleased(&self) -> Result<bool, XlError> {
        let domain = self.xl.leaving(&self.domain)?;
        Ok(domain.is_some_and(|domain| domain.name == self.domain.name))
    }

    /// Whether it was not released, and is not suspended.
    fn runs(&self, domain: &Domain) -> bool {
        domain.name == self.domain.name && domain.state != DomainState::Stopped
    }

    /// Waits for xl's permission.
    fn read_permission(&self) -> Result<(), String> {
        let pipes = self.pipes.as_ref().ok_or("xl has exited")?;
        let until = Instant::now() + self.release_max;
        let (mut reader, mut buffer) = (PermissionReader::default(), [0; 64]);
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let read = pipes.read(&mut buffer, None, left).map_err(|error| error.to_string())?;
            match read {
                FromXl::Bytes(count) => {
                    if reader.push(&buffer[..count]).map_err(|error| error.to_string())? {
                        return Ok(());
                    }
                }
                FromXl::Closed => return Err("xl has exited".to_owned()),
                FromXl::Nothing | FromXl::Woken => {
                    let seconds = self.release_max.as_secs();
                    return Err(format!("xl has not released the domain within {seconds} s"));
                }
            }
        }
    }

    /// Has xl keep its domain. A report of failure does no harm where xl still sends its stream: it
    /// is read where "ready" must be, if at all.
    fn hand_back(&mut self) {
        let Some(pipes) = self.pipes.take() else { return };
        let failed = Answer::Report { status: FAILED.get() };
        for answer in [failed, Answer::HandedBack] {
            if let Err(error) = pipes.write(answer) {
                tracing::info!(%error, "xl does not read that its domain stays");
            }
        }
        // An xl that can't write its permission does not resume its domain either.
        if self.offered {
            pipes.drain(EXIT_MAX);
        }
        pipes.ended(false, &format!("{} stays here: {}", self.domain.name, self.reason));
    }

    fn report_success(&mut self) {
        let Some(pipes) = self.pipes.take() else { return };
        if let Err(error) = pipes.write(Answer::Report { status: 0 }) {
            tracing::info!(%error, "xl does not read that its domain has left");
        }
        pipes.drain(EXIT_MAX);
        pipes.ended(true, &format!("{} runs at {}", self.domain.name, self.host));
    }

    /// Whether nothing is left of a domain that has left. xl destroys it; if xl was ended before,
    /// this does.
    fn is_gone(&self) -> Result<bool, XlError> {
        match self.xl.leaving(&self.domain)? {
            None => Ok(true),
            Some(domain) if domain.name == self.domain.name => {
                let Domain { id, name, .. } = &domain;
                tracing::error!(id, name, "it runs at the other host, and is not released here");
                Ok(false)
            }
            Some(released) => self.xl.destroy(&released).map(|()| true),
        }
    }
}

impl Effects for DepartingDomain {
    fn send(&mut self, said: &Envelope<ToDestination>) {
        self.outbox.push_back(said.clone());
    }

    fn await_completed(&mut self) -> Event {
        let Some(pipes) = &self.pipes else {
            return Event::NotCompleted { reason: "its migration has ended".into() };
        };
        if !self.offered {
            self.offered = true;
            if let Err(error) = pipes.write(Answer::Ready) {
                let reason = Reason::new(format!("xl does not read: {error}"));
                return Event::NotCompleted { reason };
            }
        }
        match self.read_permission() {
            Ok(()) => Event::Completed,
            Err(why) => Event::NotCompleted { reason: why.into() },
        }
    }

    fn go_on(&mut self, _run: bool) -> Event {
        if self.pipes.is_none() && self.offered && self.awaits_pipes() {
            return Event::CannotGoOn { reason: "xl's transport is not connected yet".into() };
        }
        self.hand_back();
        let until = Instant::now() + RESUMED_MAX;
        loop {
            let reason = match self.xl.leaving(&self.domain) {
                Ok(None) => return Event::QemuExited,
                Ok(Some(domain)) if self.runs(&domain) => return Event::WentOn,
                Ok(Some(Domain { name, id, .. })) => format!(
                    "xl has not resumed it: it is suspended, as domain {id} of the name {name}"
                ),
                Err(error) => error.to_string(),
            };
            if Instant::now() >= until {
                return Event::CannotGoOn { reason: reason.into() };
            }
            thread::sleep(LOOK);
        }
    }

    fn quit(&mut self) -> bool {
        if self.pipes.is_none() && self.awaits_pipes() {
            return false;
        }
        self.report_success();
        self.is_gone().unwrap_or_else(|error| {
            tracing::error!(%error, "it runs at the other host; the domain here stays");
            false
        })
    }

    fn in_doubt(&mut self, doubt: &Doubt) {
        tracing::warn!(?doubt, "in doubt");
    }

    fn done(&mut self, outcome: Outcome) {
        tracing::info!(?outcome, "settled");
        self.fate = Some(match outcome {
            Outcome::Lost { reason } => Outcome::Lost { reason: reason.of_domain() },
            outcome => outcome,
        });
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const UUID: &str = "0f2b4c1e-95d8-4f27-9a3e-1c9d0f6a7b42";

    #[test]
    fn a_domain_is_its_owners_until_xl_has_released_it() {
        for (name, state, expected) in [
            ("web1", "-b----", true),
            ("web1", "---s--", true),
            ("web1--migratedaway", "---s--", false),
            ("web1--incoming", "--p---", false),
            ("web1", "--p--d", false),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let program = dir.path().join("xl");
            let script = format!("#!/bin/sh\necho '{name} 7 256 1 {state} 0.0 {UUID} - -'\n");
            fs::write(&program, script).unwrap();
            fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
            let xl = Arc::new(Xl::new(program));
            let domain = MovingDomain { name: "web1".to_owned(), uuid: UUID.to_owned() };
            let leaving =
                DepartingDomain::after_restart(&xl, domain, "host-b", true, Duration::ZERO);
            assert_eq!(leaving.is_unreleased().unwrap(), expected, "{name} {state}");
        }
    }
}
