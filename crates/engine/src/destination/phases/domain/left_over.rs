//! What an earlier migration has left here of a domain that its source sends again.
//!
//! A source sends a domain again only once it is decided that its earlier migration has failed, or
//! once the domain is back. So what is left is about to be destroyed, and another copy can't have
//! its name, or its memory, before.

use std::time::{Duration, Instant};

use managers::xen::{Domain, DomainState, MovingDomain, Xl};

use crate::destination::phases::end::End;

/// Waits until nothing is left, for `limit` at most; `pause` waits between queries, while the
/// source waits for the answer.
pub(super) fn wait_destroyed(
    xl: &Xl,
    domain: &MovingDomain,
    limit: Duration,
    mut pause: impl FnMut() -> Result<(), End>,
) -> Result<(), End> {
    let until = Instant::now() + limit;
    while let Some(left) = xl.left_over(domain).map_err(End::failed)? {
        if Instant::now() >= until {
            return refuse_unless_dying(&left, domain);
        }
        let Domain { id, name, .. } = &left;
        tracing::info!(id, name, "waiting until what an earlier migration has left is destroyed");
        pause()?;
    }
    Ok(())
}

/// Xen may keep one that is being destroyed for as long as another domain has its pages. Its name
/// is free, and xl finds out whether there is memory without its own.
fn refuse_unless_dying(left: &Domain, domain: &MovingDomain) -> Result<(), End> {
    let Domain { id, name, state } = left;
    if *state == DomainState::Dying {
        tracing::warn!(id, name, "an earlier copy of the domain has not been destroyed in time");
        return Ok(());
    }
    Err(End::failed(format!(
        "an earlier copy of {} is still there, as domain {id} of the name {name}: try again once \
         its migration is settled",
        domain.name
    )))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const UUID: &str = "0f2b4c1e-95d8-4f27-9a3e-1c9d0f6a7b42";
    const COPY: &str = "web1--incoming 7 256 1 --p---";
    const DYING: &str = "(null) 7 0 0 --ps-d";
    const OTHER: &str = "web1--migratedaway 3 256 1 ---s--";
    /// Longer than anything takes here.
    const LONG: Duration = Duration::from_secs(600);

    /// Waits while xl lists what is next in `lists` after each pause; returns the result, and how
    /// many pauses there were.
    fn wait(lists: &[&str], limit: Duration) -> (Result<(), End>, usize) {
        let dir = tempfile::tempdir().unwrap();
        let (program, list) = (dir.path().join("xl"), dir.path().join("list"));
        fs::write(&program, format!("#!/bin/sh\ncat {}\n", list.display())).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let domain = MovingDomain { name: "web1".to_owned(), uuid: UUID.to_owned() };
        let show = |nth: usize| {
            let lines = lists.get(nth).map(|line| format!("{line} 0.0 {UUID} - -\n"));
            fs::write(&list, lines.unwrap_or_default()).unwrap();
        };
        let mut pauses = 0;
        show(pauses);
        let waited = wait_destroyed(&Xl::new(program), &domain, limit, || {
            pauses += 1;
            show(pauses);
            Ok(())
        });
        (waited, pauses)
    }

    #[test]
    fn it_waits_until_a_copy_is_destroyed() {
        for (lists, expected) in
            [(&[COPY, COPY, DYING][..], 3), (&[DYING][..], 1), (&[OTHER][..], 0), (&[][..], 0)]
        {
            let (waited, pauses) = wait(lists, LONG);
            waited.unwrap();
            assert_eq!(pauses, expected, "{lists:?}");
        }
    }

    #[test]
    fn a_copy_that_stays_is_the_reason_of_a_refusal() {
        let Err(End::Failed(why)) = wait(&[COPY], Duration::ZERO).0 else { panic!() };
        assert!(why.contains("domain 7 of the name web1--incoming"), "{why}");
        wait(&[DYING], Duration::ZERO).0.unwrap();
    }

    #[test]
    fn a_source_that_ends_the_migration_ends_the_wait() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("xl");
        fs::write(&program, format!("#!/bin/sh\necho '{COPY} 0.0 {UUID} - -'\n")).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let domain = MovingDomain { name: "web1".to_owned(), uuid: UUID.to_owned() };
        let cancelled = || Err(End::Over("cancelled".to_owned()));
        let waited = wait_destroyed(&Xl::new(program), &domain, LONG, cancelled);
        let Err(End::Over(why)) = waited else { panic!("{waited:?}") };
        assert_eq!(why, "cancelled");
    }
}
