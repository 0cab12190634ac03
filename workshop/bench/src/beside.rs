//! A neighbour of the migration in a run: its throughput before and during the migration.

use std::time::{Duration, Instant};

use super::neighbour::{Neighbour, Work};
use super::result::Run;
use crate::contender::Moved;
use lab::error::Result;
use lab::hosts::{Hosts, Traffic};
use lab::setup::Kit;

/// How long the neighbour is watched alone with the VM, before the migration.
const ALONE: Duration = Duration::from_secs(3);
/// Work that the migration leaves until after the VM runs is its effect, too.
const AFTER: Duration = Duration::from_millis(300);
/// Wire bytes per byte of content where packets are full: Ethernet, IPv4 and TCP with time stamps
/// around 1,448 bytes.
const WIRE_PER_CONTENT: f64 = 1514.0 / 1448.0;

pub(super) struct Beside {
    neighbour: Neighbour,
    work: Work,
    alone_since: Instant,
    /// When the VM began to move, and what host a had sent by then.
    moving_since: (Instant, Traffic),
}

impl Beside {
    /// Starts the neighbour, and watches it for a while.
    pub(super) fn start(neighbour: Neighbour, kit: &Kit, hosts: &Hosts) -> Result<Self> {
        let work = neighbour.start(kit, hosts)?;
        // Its connections need a moment to reach full speed.
        std::thread::sleep(ALONE / 3);
        let alone_since = Instant::now();
        std::thread::sleep(ALONE);
        let moving_since = (Instant::now(), hosts.a.sent()?);
        Ok(Self { neighbour, work, alone_since, moving_since })
    }

    pub(super) fn pids(&self) -> Vec<u32> {
        self.work.pids()
    }

    /// Adds the neighbour's figures to a run, and subtracts the neighbour's bytes from those on the
    /// wire.
    pub(super) fn judge(self, run: Run, hosts: &Hosts, moved: &Moved) -> Result<Run> {
        std::thread::sleep((moved.ran + AFTER).saturating_duration_since(Instant::now()));
        let fared = self.work.fared(self.alone_since, moved.began, moved.ran + AFTER);
        let (since, sent_before) = self.moving_since;
        let sent = (hosts.a.sent()? - sent_before).bytes as f64;
        let now = Instant::now();
        let took_s = (moved.ran + AFTER - moved.began).as_secs_f64();
        self.work.check()?;
        let run = Run {
            neighbour_kept: Some(fared.kept()),
            neighbour_lost_s: Some((1.0 - fared.kept()) * took_s),
            ..run
        };
        let (Neighbour::Web { .. }, Some(mbit)) = (self.neighbour, hosts.link.mbit_per_s) else {
            return Ok(run);
        };
        // Links are full duplex: only what host a sends counts.
        let moved_bytes = (sent - self.work.done(since, now) * WIRE_PER_CONTENT).max(0.0);
        let links_per_s = f64::from(hosts.link.nics) * f64::from(mbit) * 1e6 / 8.0;
        let spare_per_s = links_per_s - fared.before_per_s * WIRE_PER_CONTENT;
        let spare = spare_per_s * (moved.ran - moved.began).as_secs_f64();
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bytes")]
        let wire_bytes = moved_bytes as u64;
        Ok(Run { wire_bytes, spare_used: Some(moved_bytes / spare.max(1.0)), ..run })
    }
}
