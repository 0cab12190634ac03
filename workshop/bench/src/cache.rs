//! Contests of guests whose memory is mostly page cache, with their disk on a storage host:
//! contenders take turns, each with new hosts, a new guest and a new disk.

pub mod figures;
pub(crate) mod files;
mod goals;
pub mod helper;
mod one;
pub mod scenarios;

use super::goals::Goal;
use super::result::{Outcome, Run};
use super::rounds::{Contest, Rounds};
use super::table;
use files::Files;
use lab::error::Result;
use lab::hosts::Hosts;
use lab::setup::Kit;
use scenarios::{CacheScenario, Contestant, Links};

/// Runs a scenario with these links, prints the course, and writes the results so far after each
/// run. `only` names the contenders that take part; if it is empty, all do.
///
/// # Errors
/// If the lab itself fails; a failed contender is a result.
pub fn run(
    kit: &Kit,
    scenario: &CacheScenario,
    links: Links,
    runs: u32,
    only: &[String],
) -> Result<Outcome> {
    let label = scenario.label(links);
    println!("{label}: {}; {links}", scenario.about);
    let files = Files::make(&scenario.layout())?;
    let mut outcome = empty(kit, scenario, links)?;
    let contest = CacheContest { kit, scenario, links, files: &files, label: &label };
    let rounds = Rounds { label: &label, runs, only };
    rounds.run(&contest, &mut outcome)?;
    println!("\n{}", table::markdown(&outcome));
    rounds.conclude(&outcome)?;
    Ok(outcome)
}

struct CacheContest<'a> {
    kit: &'a Kit,
    scenario: &'a CacheScenario,
    links: Links,
    files: &'a Files,
    label: &'a str,
}

impl Contest for CacheContest<'_> {
    type Contender = Contestant;

    fn contenders(&self) -> Vec<Contestant> {
        self.scenario.contestants()
    }

    fn name(&self, contestant: &Contestant) -> String {
        contestant.name()
    }

    fn run(&self, contestant: &mut Contestant) -> Result<Run> {
        one::run(self.kit, self.scenario, self.links, self.files, self.label, contestant)
    }

    fn told(&self, run: &Run) -> String {
        counted(run)
    }

    fn goals(&self, outcome: &Outcome) -> Vec<Goal> {
        goals::of(outcome, self.links)
    }
}

fn empty(kit: &Kit, scenario: &CacheScenario, links: Links) -> Result<Outcome> {
    let control = Hosts::new(links.network())?.a.congestion_control.clone();
    Ok(Outcome {
        scenario: scenario.name.to_owned(),
        guest: scenario.guest_json(),
        links: scenario.links_json(links, &control),
        qemu: kit.qemu_version.to_string(),
        accel: kit.accelerator.to_string(),
        ..Outcome::default()
    })
}

fn counted(run: &Run) -> String {
    let Some(cache) = &run.cache else { return String::new() };
    let mb = |bytes: u64| bytes as f64 / 1e6;
    let mut text = format!(
        ", SAN {:.1} MB, {:.1} MB restorable",
        mb(cache.san_bytes),
        mb(cache.restorable_bytes)
    );
    if let Some(restored) = cache.restored_bytes {
        text += &format!(" ({:.1} restored)", mb(restored));
    }
    text += &format!(", {:.2} cores busy", cache.cores_busy);
    if let Some(back_s) = cache.back_to_full_s {
        text += &format!(", full after {back_s:.2} s, lost {:.0} pages", cache.pages_lost);
    }
    for note in &cache.notes {
        text += &format!("\n      note: {note}");
    }
    text
}
