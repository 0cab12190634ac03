//! Contests of guests whose memory is mostly page cache, with their disk on a storage
//! host: contenders in turn, each with new hosts, a new guest and a new disk.

pub mod figures;
mod files;
mod goals;
pub mod helper;
mod one;
pub mod scenarios;

use super::contest::{add, path, save, save_at, told, whole};
use super::result::{Outcome, Run};
use super::{paired, table};
use files::Files;
use lab::error::{LabError, Result};
use lab::hosts::Hosts;
use lab::setup::Kit;
use scenarios::{CacheScenario, Links};

/// Runs a scenario with these links, prints what happens, and writes the results,
/// after each run those that there are. `only` names the contenders that take part;
/// none named means all.
///
/// # Errors
/// If the lab itself fails; a contender that fails is a result.
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
    let part = format!("{label}-part");
    let mut outcome = empty(kit, scenario, links)?;
    for nth in 1..=runs {
        let mut contestants = scenario.contestants();
        if nth.is_multiple_of(2) {
            // What the first of a round finds the last finds in the next.
            contestants.reverse();
        }
        contestants.retain(|one| only.is_empty() || only.contains(&one.name()));
        for mut contestant in contestants {
            let name = contestant.name();
            let run = match one::run(kit, scenario, links, &files, &label, &mut contestant) {
                Ok(run) => run,
                Err(error) => failed(&error),
            };
            println!("  {nth}/{runs} {name:18} {}{}", told(&run), counted(&run));
            add(&mut outcome, name, run);
            outcome.goals = goals::of(&outcome, links);
            save(&part, &outcome)?;
        }
    }
    println!("\n{}", table::markdown(&outcome));
    println!("{}", paired::markdown(&outcome));
    for goal in &outcome.goals {
        println!("{goal}");
    }
    // A partial run must not stand in for a whole one.
    let path = if only.is_empty() { whole(&label)? } else { path(&part) };
    save_at(&path, &outcome)?;
    println!("\n{}", path.display());
    Ok(outcome)
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

fn failed(error: &LabError) -> Run {
    let unfinished_s = match error {
        LabError::Late { waited, .. } => Some(waited.as_secs_f64()),
        _ => None,
    };
    Run { unfinished_s, error: Some(error.to_string()), ..Run::default() }
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
