//! Use of a renewed certificate without a restart: its files are reread when they change,
//! on SIGHUP, and again and again while they can't be used.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use api::Happening;
use identity::{Files, Identity};
use tokio::signal::unix::Signal;
use tokio::time::{MissedTickBehavior, interval};

use crate::events::Events;
use crate::watched::Watched;

/// The interval between checks; renewals take days, and copying several files takes less than this.
const LOOK_AGAIN: Duration = Duration::from_secs(10);

/// When the files were last written.
type Times = [Option<SystemTime>; 3];

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
    let mut watched = Watched::new(files.changed());
    let mut expiry = Expiry::default();
    loop {
        let is_told = tokio::select! {
            _ = turns.tick() => false,
            _ = told.recv() => true,
        };
        if watched.look(files.changed(), is_told) {
            reload(&mut watched, &identity, &files, &events);
        }
        expiry.look(&identity, &events, SystemTime::now());
    }
}

fn reload(watched: &mut Watched<Times>, identity: &Identity, files: &Files, events: &Events) {
    match identity.reload(files) {
        Ok(()) => {
            watched.accept();
            tracing::info!("the certificate was read again: {}", identity.validity());
            let until_unix_s = identity.validity().not_after_s;
            events.publish(Happening::CertificateRenewed { until_unix_s });
            if let Some(warning) = identity.warning(SystemTime::now()) {
                tracing::warn!("{warning}");
            }
        }
        Err(error) => {
            let why = error.to_string();
            if watched.refuse(&why) {
                tracing::error!(
                    error = why,
                    "the certificate was not replaced, the previous one is used; retrying"
                );
            }
        }
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
        let validity = identity.validity();
        let until_unix_s = validity.not_after_s;
        // A wrong clock is a matter for the log and `doctor`.
        let Some(problem) = identity.warning(now).filter(|_| !validity.is_early(now)) else {
            return;
        };
        if self.told_until_s.replace(until_unix_s) != Some(until_unix_s) {
            events.publish(Happening::CertificateExpires { until_unix_s, problem });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{Permissions, set_permissions};
    use std::os::unix::fs::PermissionsExt;

    use identity::{Authority, CertificateRequest, Subject};

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
            authority.issue(&CertificateRequest { subject, days, out, replace }).unwrap().files
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
            reload(&mut Watched::new(files.changed()), &identity, &files, &events);
            look();
            assert_eq!(events.told().len(), told);
        }
        let until = |events: Vec<Happening>| match events.last() {
            Some(Happening::CertificateRenewed { until_unix_s }) => *until_unix_s,
            other => panic!("{other:?}"),
        };
        assert!(until(events.told()) > *until_unix_s);
    }

    #[test]
    fn a_certificate_that_cannot_be_used_is_tried_again_without_a_change_of_its_files() {
        let dir = tempfile::tempdir().unwrap();
        Authority::create(dir.path(), 1000).unwrap();
        let authority = Authority::open(dir.path()).unwrap();
        let (subject, out) = (Subject::host("here").unwrap(), dir.path().join("here"));
        let request = CertificateRequest { subject, days: 800, out, replace: false };
        let files = authority.issue(&request).unwrap().files;
        let identity = Identity::load("here", &files).unwrap();
        let events = Events::new(Limits::default()).unwrap();
        let mode = |mode| set_permissions(&files.key, Permissions::from_mode(mode)).unwrap();
        // As if they were newer.
        let (now, mut watched) = (files.changed(), Watched::new([None; 3]));
        assert!(!watched.look(now, false), "they may be half copied");
        mode(0o644);
        let refused = identity.reload(&files).unwrap_err().to_string();
        assert!(refused.contains("chmod 600"), "{refused}");
        for _ in 0..2 {
            assert!(watched.look(now, false));
            reload(&mut watched, &identity, &files, &events);
        }
        assert!(events.told().is_empty());
        mode(0o600);
        assert!(watched.look(now, false));
        reload(&mut watched, &identity, &files, &events);
        assert!(matches!(events.told()[..], [Happening::CertificateRenewed { .. }]));
        assert!(!watched.look(now, false) && watched.look(now, true));
    }
}
