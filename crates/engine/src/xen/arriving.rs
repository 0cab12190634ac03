//! A domain that arrives at this host: what a destination's decisions are for xl's receiver.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use managers::xen::{Domain, MovingDomain, Xl, XlError};
use switchover::destination::{Effects, Event, Noted, Outcome};
use switchover::{Doubt, Envelope, Found, Reason, ToSource};

use super::receiver::{Permitted, Receiver};

/// A domain that arrives.
#[derive(Debug)]
pub struct ArrivingDomain {
    xl: Arc<Xl>,
    domain: MovingDomain,
    /// None: it has exited, or the agent was restarted. One that can't be ended stays, and nothing
    /// is done to its copy before it has exited.
    receiver: Option<Receiver>,
    /// Whether the copy was to run. Until then it does not have the domain's own name, and a paused
    /// domain of this name is another one, such as that of a later migration.
    permitted: bool,
    /// Until when a receiver may report that its copy runs.
    run_max: Duration,
    ran: Option<Instant>,
    /// What to send, in order.
    pub outbox: VecDeque<Envelope<ToSource>>,
    /// Its fate, once that is decided.
    pub fate: Option<Outcome>,
}

impl ArrivingDomain {
    /// A domain that a receiver receives.
    pub(crate) fn new(
        xl: &Arc<Xl>,
        domain: MovingDomain,
        receiver: Receiver,
        run_max: Duration,
    ) -> Self {
        Self { receiver: Some(receiver), run_max, ..Self::after_restart(xl, domain, false) }
    }

    /// A domain whose agent has restarted, so that its receiver has exited. `permitted`: according
    /// to its journal, it was to run.
    #[must_use]
    pub fn after_restart(xl: &Arc<Xl>, domain: MovingDomain, permitted: bool) -> Self {
        Self {
            xl: Arc::clone(xl),
            domain,
            receiver: None,
            permitted,
            run_max: Duration::ZERO,
            ran: None,
            outbox: VecDeque::new(),
            fate: None,
        }
    }

    /// The state of the domain after a restart of the agent. Once it was noted that it runs here,
    /// its owner may have shut it down, or moved it on.
    ///
    /// # Errors
    /// If it is not known.
    pub fn found(&self, noted: Noted) -> Result<Found, XlError> {
        if matches!(noted, Noted::Running | Noted::Left) || self.xl.has_arrived(&self.domain)? {
            return Ok(Found::Runs);
        }
        Ok(self.copy()?.map_or(Found::Missing, |_| Found::Stopped))
    }

    /// The copy that does not run; none if there is none.
    fn copy(&self) -> Result<Option<Domain>, XlError> {
        let copy = self.xl.arriving(&self.domain)?;
        Ok(copy.filter(|copy| self.permitted || copy.name != self.domain.name))
    }

    /// Whether it runs here: then only its owner destroys it.
    ///
    /// # Errors
    /// If it is not known.
    pub fn runs_here(&self) -> Result<bool, XlError> {
        self.xl.has_arrived(&self.domain)
    }

    pub(crate) fn receiver(&self) -> Option<&Receiver> {
        self.receiver.as_ref()
    }

    /// How long it has run here.
    pub(crate) fn ran_ms(&self) -> f64 {
        self.ran.map_or(0.0, |ran| ran.elapsed().as_secs_f64() * 1e3)
    }

    /// Ends the receiver; returns whether it has exited.
    fn ends_receiver(&mut self) -> bool {
        let has_exited = self.receiver.as_mut().is_none_or(Receiver::end);
        if has_exited {
            self.receiver = None;
        }
        has_exited
    }

    /// Whether a receiver that had the permission may have run its copy before it was ended: then
    /// only its owner ends it.
    fn may_run(&self) -> bool {
        let name = &self.domain.name;
        match self.runs_here() {
            Ok(false) => return false,
            Ok(true) => tracing::error!(name, "it was to be given back, and runs here"),
            Err(error) => tracing::error!(name, %error, "cannot query whether it runs here"),
        }
        true
    }

    /// What is known of a copy whose receiver has the permission, does not report, and can't be
    /// ended: it may run the copy or destroy it as long as it has not exited.
    fn hangs(&self) -> Event {
        // Then it can only report that.
        if matches!(self.xl.has_arrived(&self.domain), Ok(true)) {
            return Event::Runs;
        }
        let pid = self.receiver.as_ref().map_or(0, Receiver::pid);
        let reason = format!(
            "xl's receiver, process {pid}, neither reports nor ends: it waits in the kernel"
        );
        Event::ContFailed { reason: reason.into(), never_ran: false }
    }

    /// Does what the receiver would have done, which has exited.
    fn run_without_receiver(&mut self) -> Event {
        let failed = |error: XlError| Event::ContFailed {
            reason: error.to_string().into(),
            never_ran: false,
        };
        match self.xl.has_arrived(&self.domain) {
            Ok(true) => return Event::Runs,
            Ok(false) => {}
            Err(error) => return failed(error),
        }
        match self.copy() {
            Ok(Some(copy)) => match self.xl.run(&self.domain, &copy) {
                Ok(()) => Event::Runs,
                Err(error) => failed(error),
            },
            Ok(None) => Event::QemuExited,
            Err(error) => failed(error),
        }
    }
}

impl Effects for ArrivingDomain {
    fn send(&mut self, said: &Envelope<ToSource>) {
        let mut said = said.clone();
        if let ToSource::Refused { reason } | ToSource::Lost { reason } = &mut said.message {
            *reason = std::mem::take(reason).of_domain();
        }
        self.outbox.push_back(said);
    }

    fn cont(&mut self) -> Event {
        self.permitted = true;
        let run_max = self.run_max;
        let permitted = self.receiver.as_mut().map_or(Permitted::Unknown, |receiver| {
            let permitted = receiver.permit(run_max);
            if let Permitted::Failed(_) = permitted {
                // It destroys its copy.
                receiver.close();
            }
            permitted
        });
        let has_exited = self.ends_receiver();
        let event = match permitted {
            Permitted::Runs => Event::Runs,
            Permitted::Failed(status) => Event::ContFailed {
                reason: Reason::new(format!("xl can't run it: status {status}")),
                never_ran: true,
            },
            Permitted::Unknown if !has_exited => self.hangs(),
            // The receiver was ended by now: nothing else runs it.
            Permitted::Unknown => self.run_without_receiver(),
        };
        if matches!(event, Event::Runs) {
            self.ran.get_or_insert_with(Instant::now);
        }
        event
    }

    /// xl has done all.
    fn settle(&mut self) {}

    fn kill(&mut self) -> bool {
        if let Some(receiver) = &mut self.receiver {
            receiver.close();
        }
        // Otherwise that it never ran here is not certain.
        if !self.ends_receiver() {
            return false;
        }
        // Its source must not receive that it never ran here, and resume its own.
        if self.permitted && self.may_run() {
            return false;
        }
        let destroyed = self.copy().and_then(|copy| match copy {
            Some(copy) => self.xl.destroy(&copy),
            None => Ok(()),
        });
        if let Err(error) = &destroyed {
            tracing::error!(%error, "the copy of a domain that doesn't arrive can't be destroyed");
        }
        destroyed.is_ok()
    }

    fn in_doubt(&mut self, doubt: &Doubt) {
        tracing::warn!(?doubt, "in doubt");
    }

    fn done(&mut self, outcome: Outcome) {
        tracing::info!(?outcome, "settled");
        self.fate = Some(outcome);
    }

    /// The domain is Xen's own, and not an agent's.
    fn noted(&mut self) -> Result<(), Reason> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::path::{Path, PathBuf};

    use switchover::MigrationId;

    use super::*;

    const UUID: &str = "0f2b4c1e-95d8-4f27-9a3e-1c9d0f6a7b42";

    /// An xl that lists web1 in this state, and notes what it destroys.
    fn xl(dir: &Path, state: &str) -> (Arc<Xl>, PathBuf) {
        let (program, destroyed) = (dir.join("xl"), dir.join("destroyed"));
        let script = format!(
            "#!/bin/sh\ncase $1 in list) echo 'web1 7 256 1 {state} 0.0 {UUID} - -';; \
             destroy) echo $2 > {};; esac\n",
            destroyed.display()
        );
        fs::write(&program, script).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        (Arc::new(Xl::new(program)), destroyed)
    }

    fn arriving(xl: &Arc<Xl>, permitted: bool) -> ArrivingDomain {
        let domain = MovingDomain { name: "web1".to_owned(), uuid: UUID.to_owned() };
        ArrivingDomain::after_restart(xl, domain, permitted)
    }

    #[test]
    fn a_paused_domain_is_a_copy_only_if_a_receiver_was_permitted() {
        let dir = tempfile::tempdir().unwrap();
        let (xl, destroyed) = xl(dir.path(), "--p---");
        let mut other = arriving(&xl, false);
        assert_eq!(other.found(Noted::Refused).unwrap(), Found::Missing);
        assert!(other.kill() && !destroyed.exists());
        let mut copy = arriving(&xl, true);
        assert_eq!(copy.found(Noted::Starting).unwrap(), Found::Stopped);
        assert!(copy.kill());
        assert_eq!(fs::read_to_string(destroyed).unwrap(), "7\n");
    }

    /// Such as by a receiver that hung with its permission, and went on. If none was permitted, it
    /// is another domain of this name.
    #[test]
    fn a_copy_that_runs_after_all_does_not_count_as_ended() {
        let dir = tempfile::tempdir().unwrap();
        let (xl, destroyed) = xl(dir.path(), "-b----");
        assert!(!arriving(&xl, true).kill());
        assert!(arriving(&xl, false).kill());
        assert!(!destroyed.exists());
        let silent = Arc::new(Xl::new("/nowhere/xl".into()));
        assert!(!arriving(&silent, true).kill());
    }

    #[test]
    fn a_domain_that_has_ended_is_not_called_a_qemu() {
        let xl = Arc::new(Xl::new("/nowhere/xl".into()));
        let mut arriving = arriving(&xl, true);
        let message = ToSource::Lost { reason: "its QEMU ended".into() };
        arriving.send(&Envelope { migration: MigrationId::random().unwrap(), message });
        let sent = arriving.outbox.pop_front().map(|said| said.message);
        assert_eq!(sent, Some(ToSource::Lost { reason: "the domain ended".into() }));
    }
}
