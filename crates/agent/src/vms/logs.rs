//! Bounds the logs of VMs, which guests can fill, so that they leave room in the state directory.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use qemu::launch::bound_log;
use tokio::task::spawn_blocking;
use tokio::time::{MissedTickBehavior, interval};

use crate::vms::record::seats;

/// The name of a log in the seat of its QEMU.
const LOG: &str = "qemu.log";
/// How often the lengths of all logs are checked. Between two checks a guest writes what its
/// console takes: some hundred KB by a serial port.
const CHECK_EVERY: Duration = Duration::from_secs(1);

/// Bounds the logs of the VMs in this directory until the agent ends.
pub(crate) async fn bound(vms: PathBuf) {
    let mut turns = interval(CHECK_EVERY);
    turns.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut logged = String::new();
    loop {
        turns.tick().await;
        let vms = vms.clone();
        // A panic was logged.
        let Ok(checked) = spawn_blocking(move || bound_all(&vms)).await else { continue };
        let why = checked.err().map_or_else(String::new, |error| error.to_string());
        if !why.is_empty() && why != logged {
            tracing::warn!(why, "a VM's log can't be bounded, or its older lines kept");
        }
        logged = why;
    }
}

/// Bounds each log, and returns the first error after it has tried all.
fn bound_all(vms: &Path) -> io::Result<()> {
    let mut outcome = Ok(());
    for entry in fs::read_dir(vms)? {
        for log in seats(&entry?.path()).map(|seat| seat.join(LOG)) {
            match bound_log(&log) {
                Ok(false) => {}
                Ok(true) => tracing::debug!(log = %log.display(), "a VM's log was emptied"),
                Err(error) => {
                    let named = format!("{}: {error}", log.display());
                    outcome = outcome.and(Err(io::Error::other(named)));
                }
            }
        }
    }
    outcome
}

#[cfg(test)]
mod tests {
    use qemu::launch::LOG_BYTES_MAX;

    use super::*;

    #[test]
    fn every_vms_log_is_bounded_whatever_the_others_do() {
        let dir = tempfile::tempdir().unwrap();
        let long = vec![b'x'; usize::try_from(LOG_BYTES_MAX).unwrap() + 1];
        for vm in ["web1", "web2", "web3", "web4"] {
            fs::create_dir(dir.path().join(vm)).unwrap();
        }
        let log = |vm: &str| dir.path().join(vm).join(LOG);
        // That of web4 is adopted, and elsewhere. web3 got another QEMU.
        let second = dir.path().join("web3/2");
        fs::create_dir(&second).unwrap();
        fs::write(second.join(LOG), &long).unwrap();
        fs::write(log("web1"), &long).unwrap();
        fs::create_dir(log("web2")).unwrap();
        fs::write(log("web3"), &long).unwrap();
        let why = bound_all(dir.path()).unwrap_err().to_string();
        assert!(why.contains("/web2/qemu.log: "), "{why}");
        for vm in ["web1", "web3"] {
            assert_eq!(fs::metadata(log(vm)).unwrap().len(), 0);
        }
        assert_eq!(fs::metadata(second.join(LOG)).unwrap().len(), 0);
        fs::remove_dir(log("web2")).unwrap();
        bound_all(dir.path()).unwrap();
    }
}
