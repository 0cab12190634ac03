//! Use of a renewed certificate without a restart: its files are reread when they change,
//! and on SIGHUP.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use api::Happening;
use identity::{Files, Identity};
use tokio::signal::unix::Signal;
use tokio::time::{MissedTickBehavior, interval};

use crate::events::Events;

/// The interval between checks; renewals take days, and copying several files takes less than this.
const LOOK_AGAIN: Duration = Duration::from_secs(10);

/// Watches the files until the agent ends.
///
/// Open connections keep the certificate that they began with, so a renewal affects no migration.
pub(crate) async fn follow(
    identity: Arc<Identity>,
    files: Files,
    events: Arc<Events>,
    mut told: Signal,
) {
    let mut turns = interval(LOOK_AGAIN);
    turns.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut used = files.changed();
    // The files at the last check, which may have been half copied.
    let mut seen = used;
    let mut expiry = Expiry::default();
    loop {
        let is_told = tokio::select! {
            _ = turns.tick() => false,
            _ = told.recv() => true,
        };
        let now = files.changed();
        let is_whole = now == seen;
        seen = now;
        if is_told || (now != used && is_whole) {
            used = now;
            reload(&identity, &files, &events);
        }
        expiry.look(&identity, &events, SystemTime::now());
    }
}

/// The certificate whose expiry was published.
#[derive(Default)]
struct Expiry {
    told_until_s: Option<i64>,
}

impl Expiry {
    /// Publishes once for each certificate that it is about to expire.
    fn look(&mut self, identity: &Identity, events: &Events, now: SystemTime) {
        let until_unix_s = identity.validity().not_after_s;
        let Some(problem) = identity.warning(now) else { return };
        if self.told_until_s.replace(until_unix_s) != Some(until_unix_s) {
            events.tell(Happening::CertificateExpires { until_unix_s, problem });
        }
    }
}

fn reload(identity: &Identity, files: &Files, events: &Events) {
    match identity.reload(files) {
        Ok(()) => {
            tracing::info!("the certificate was read again: {}", identity.validity());
            let until_unix_s = identity.validity().not_after_s;
            events.tell(Happening::CertificateRenewed { until_unix_s });
            if let Some(warning) = identity.warning(SystemTime::now()) {
                tracing::warn!("{warning}");
            }
        }
        Err(error) => {
            tracing::error!(%error, "the certificate was not replaced, the one before is used");
        }
    }
}

#[cfg(test)]
mod tests {
    use identity::{Authority, Subject, Wanted};

    use super::*;
    use crate::events::Limits;

    #[test]
    fn a_renewal_is_told_and_an_end_once_for_each_certificate() {
        let dir = tempfile::tempdir().unwrap();
        Authority::create(dir.path(), 1000).unwrap();
        let authority = Authority::open(dir.path()).unwrap();
        let issue = |days, replace| {
            let subject = Subject::host("here").unwrap();
            let out = dir.path().join("here");
            authority.issue(&Wanted { subject, days, out, replace }).unwrap().files
        };
        let files = issue(1, false);
        let identity = Identity::load("here", &files).unwrap();
        let events = Events::new(Limits::default()).unwrap();
        let mut expiry = Expiry::default();
        let mut look = || expiry.look(&identity, &events, SystemTime::now());
        look();
        look();
        let told = events.told();
        let [Happening::CertificateExpires { until_unix_s, problem }] = &told[..] else {
            panic!("{told:?}")
        };
        assert!(problem.contains("here expires on"), "{problem}");
        // One that also expires soon, then one that does not.
        for (days, told) in [(2, 3), (800, 4)] {
            issue(days, true);
            reload(&identity, &files, &events);
            look();
            assert_eq!(events.told().len(), told);
        }
        let until = |events: Vec<Happening>| match events.last() {
            Some(Happening::CertificateRenewed { until_unix_s }) => *until_unix_s,
            other => panic!("{other:?}"),
        };
        assert!(until(events.told()) > *until_unix_s);
    }
}
