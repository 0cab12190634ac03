//! One run: one contender moves one guest whose program is at work.

use std::fs;
use std::path::Path;
use std::time::Duration;

use super::app::{AppScenario, FAST_MBIT};
use super::load::Load;
use super::{AppContest, GOAL, TIMEOUT, check};
use crate::contender::{Contender, Ground};
use crate::contest::save;
use crate::cpu::{self, CpuMeter};
use crate::result::Run;
use crate::{image, warm};
use lab::error::{FileContext, Result};
use lab::field::{self, Snapshot};
use lab::guest::GuestSpec;
use lab::hosts::{Hosts, Outside, RUN_DIR, Storage};

const VM: &str = "bench";
/// Memory to warm for the arriving guest and for buffers of the transfer.
const WARM_BYTES: u64 = 1 << 30;
/// Longest time until a moved guest reports again.
const HEARD_MAX: Duration = Duration::from_secs(20);

pub(super) fn run(contest: &AppContest<'_>, contender: &mut dyn Contender) -> Result<Run> {
    let AppContest { kit, scenario, snapshot } = *contest;
    let hosts = Hosts::new(scenario.link())?;
    let outside = Outside::join(&hosts)?;
    let (spec, storage) = disks(scenario, snapshot, &hosts)?;
    let from = snapshot.incoming();
    let ground = Ground {
        kit,
        hosts: &hosts,
        disk: None,
        downtime_goal: GOAL,
        timeout: TIMEOUT,
        from: Some(&from),
    };
    let guest = contender.start(&ground, &spec)?;
    guest.expect_on(&hosts.b)?;
    let load = Load::start(scenario, &guest, &outside, storage.as_ref())?;
    warm::memory(WARM_BYTES);
    let cpu = CpuMeter::start(&[&hosts.a, &hosts.b], Vec::new(), cpu::OFTEN)?;
    let traffic = hosts.traffic()?;
    guest.forget_gap();
    let moved = contender.migrate(&ground);
    if let Some(report) = contender.report() {
        save(&format!("{}-{}-report", scenario.name, contender.name()), report)?;
    }
    let moved = moved?;
    guest.wait_beat(HEARD_MAX)?;
    let felt = guest.felt(moved.began, moved.ran);
    let spent = cpu.since(moved.began);
    let wire_bytes = (hosts.traffic()? - traffic).bytes;
    let (app, served) = load.judge(&moved);
    let right = served.as_ref().is_none_or(|served| served.wrong == 0) && load.wrong() == 0;
    if let Some(storage) = &storage {
        storage.shape(FAST_MBIT)?;
    }
    let right = check::is_right(scenario, &guest)? && right;
    let checked = guest.check()?;
    contender.stop();
    Ok(Run {
        ok: true,
        intact: checked.wrong == 0 && checked.pages > 0 && right,
        total_s: (moved.ran - moved.began).as_secs_f64(),
        prepare_s: moved.prepare.as_secs_f64(),
        downtime_ms: moved.downtime.as_secs_f64() * 1e3,
        guest_gap_ms: felt.gap.as_secs_f64() * 1e3,
        wire_bytes,
        cpu_s: spent.processes_s,
        stolen_s: spent.stolen_s,
        guest_work: if app.before_per_s > 0.0 {
            app.meanwhile_per_s / app.before_per_s
        } else {
            0.0
        },
        app: Some(app),
        served,
        ..Run::default()
    })
}

/// The guest with its disks as they were in the snapshot, and the storage host if they are there.
fn disks(
    scenario: AppScenario,
    snapshot: &Snapshot,
    hosts: &Hosts,
) -> Result<(GuestSpec, Option<Storage>)> {
    let mut disks = snapshot.disks(&hosts.a.run_dir)?;
    if scenario.from_storage {
        let storage = Storage::join(hosts)?;
        let [root, data] = field::EXPORTED;
        storage.export(root, &disks.root, "qcow2")?;
        storage.export(data, &disks.data, "raw")?;
        return Ok((snapshot.spec_from_storage(VM), Some(storage)));
    }
    if scenario.moves_disk {
        // Where only its own host sees it.
        let own = hosts.a.run_dir.join(image::FILE);
        fs::rename(&disks.data, &own).at("rename", &own)?;
        disks.data = Path::new(RUN_DIR).join(image::FILE);
    }
    Ok((snapshot.spec(VM, &disks), None))
}
