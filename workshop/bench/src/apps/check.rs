//! Whether a program's data is right after a move, by the program's own means.

use super::app::{App, AppScenario};
use lab::error::{LabError, Result};
use lab::field::SYSBENCH_ROWS;
use lab::guest::Guest;

/// pgbench adds each amount to three tables, and notes it in a fourth.
const SUMS: &str = "select count(distinct sum) from (\
     select coalesce(sum(abalance), 0) as sum from pgbench_accounts union all \
     select coalesce(sum(tbalance), 0) from pgbench_tellers union all \
     select coalesce(sum(bbalance), 0) from pgbench_branches union all \
     select coalesce(sum(delta), 0) from pgbench_history) as sums";

/// Ends a program's work, and checks its data; what clients have read is not part of it.
pub(super) fn is_right(scenario: AppScenario, guest: &Guest) -> Result<bool> {
    match scenario.app {
        App::Memcached if scenario.moves_disk => is_disk_right(guest, "true"),
        App::Memcached | App::Nginx => Ok(true),
        App::Sysbench => sysbench(guest),
        App::Postgres => postgres(guest, scenario.database()),
        App::Dbench => is_disk_right(guest, &ended("dbench")),
        App::Postmark => is_disk_right(guest, &ended("postmark")),
    }
}

fn postgres(guest: &Guest, database: &str) -> Result<bool> {
    let query = format!("psql -qAt -c \"{SUMS}\" {database}");
    let line = format!("{}; su postgres -c '{query}'", ended("pgbench"));
    let Some(sums) = answer(guest, &line)? else { return Ok(false) };
    if sums.trim() != "1" {
        eprintln!("lab: the database's tables have {sums} different sums");
        return Ok(false);
    }
    has_right_checksums(guest)
}

/// Each of its transactions inserts as many rows as it deletes.
fn sysbench(guest: &Guest) -> Result<bool> {
    let query = "psql -qAt -c \"select count(*) from sbtest1\" sbtest";
    let line = format!("{}; su postgres -c '{query}'", ended("sysbench"));
    let Some(rows) = answer(guest, &line)? else { return Ok(false) };
    if rows.trim() != SYSBENCH_ROWS.to_string() {
        eprintln!("lab: sysbench's table has {rows} rows, and should have {SYSBENCH_ROWS}");
        return Ok(false);
    }
    has_right_checksums(guest)
}

/// Each page of the databases has a checksum.
fn has_right_checksums(guest: &Guest) -> Result<bool> {
    let line = "pg_ctlcluster 15 main stop -m fast && su postgres -c \
                '/usr/lib/postgresql/15/bin/pg_checksums --check -D /var/lib/postgresql/15/main'";
    Ok(answer(guest, line)?.is_some())
}

/// After a line that ends a program, the file system of the disk that it has written to is sound,
/// and a file that nothing has written to is on it as it was.
fn is_disk_right(guest: &Guest, ended: &str) -> Result<bool> {
    let line = "umount /srv && e2fsck -fn /dev/vdb && mount /srv && \
                sha256sum --quiet --check /srv/kept.sum";
    Ok(answer(guest, &format!("{ended}; {line}"))?.is_some())
}

/// A line that ends a program, and waits until it has ended.
fn ended(program: &str) -> String {
    format!("pkill {program}; while pgrep {program} >/dev/null; do sleep 0.2; done")
}

/// The output of a line that a shell in the guest runs; none if it fails.
fn answer(guest: &Guest, line: &str) -> Result<Option<String>> {
    match guest.ask(&format!("sh {line}")) {
        Ok(output) => Ok(Some(output)),
        Err(error @ LabError::Guest { .. }) => {
            eprintln!("lab: {error}");
            Ok(None)
        }
        Err(error) => Err(error),
    }
}
