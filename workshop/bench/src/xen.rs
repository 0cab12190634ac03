//! A domain of Xen's between two emulated hosts: by xl alone over one plain connection, and through
//! agents over one link and over four. Emulated hosts move some ten MB/s, so links have less.

use serde::Serialize;

use super::contest::{path, save_at};
use super::goals::Goal;
use super::result::median;
use lab::agent::binary;
use lab::error::{LabError, Result};
use lab::setup::{self, Kit};
use lab::xen::{DomainSpec, LINKS, Virtualization, XenHost, XenHosts};

/// Its name: `make bench-NAME`.
pub const NAME: &str = "xen";
/// What it measures, for people.
pub const ABOUT: &str = "a PV domain of 128 MiB between two emulated hosts with Xen 4.17, four \
                         links of 10 Mbit/s each";
const MBIT_PER_S: u32 = 10;
const DOMAIN: &str = "bench";
const MEMORY_MIB: u32 = 128;
/// Half of it can be compressed, to a quarter. With 64 MiB, Debian's kernel has too little left to
/// boot.
const LOAD_MIB: u32 = 40;
/// Checks of all memory after a move: the first one may have started before it.
const CHECKS: u64 = 2;

const XL: &str = "xl alone, one link";
const ONE: &str = "agents, one link";
const FOUR: &str = "agents, four links";
/// The contenders, with the links that agents use; none without agents.
const CONTENDERS: [(&str, Option<usize>); 3] = [(XL, None), (ONE, Some(1)), (FOUR, Some(LINKS))];
const IDLE: &str = "idle";
const WRITING: &str = "writing 0.8 MB/s";
/// The guests, with the pages that they write per second.
const GUESTS: [(&str, u32); 2] = [(IDLE, 0), (WRITING, 200)];

/// One move.
#[derive(Clone, Debug, Default, Serialize)]
struct Measured {
    guest: &'static str,
    contender: &'static str,
    /// From the start of `xl migrate` to its end.
    total_s: f64,
    /// The longest time in which the guest did not run.
    downtime_s: f64,
    /// Bytes on all links, in both directions.
    wire_bytes: u64,
}

/// All figures.
#[derive(Debug, Serialize)]
struct Figures {
    measured: Vec<Measured>,
    goals: Vec<Goal>,
}

/// Moves both guests by all contenders in turn, `runs` times, prints the figures and writes them.
///
/// # Errors
/// If the lab fails, a domain doesn't arrive, or its memory is wrong.
pub fn run(kit: &Kit, runs: u32) -> Result<()> {
    println!("{NAME}: {ABOUT}");
    let hosts = XenHosts::boot(kit, &setup::xen()?, &binary())?;
    for host in [&hosts.a, &hosts.b] {
        host.limit(Some(MBIT_PER_S))?;
    }
    let mut measured = Vec::new();
    for (guest, pages_per_s) in GUESTS {
        hosts.a.create(&spec(pages_per_s))?;
        let mut from = &hosts.a;
        for nth in 1..=runs {
            for (contender, links) in CONTENDERS {
                let one = Measured { guest, contender, ..measure(&hosts, from, contender, links)? };
                println!(
                    "  {nth}/{runs} {guest}, {contender}: {:6.1} s, downtime {:5.2} s, {:6.1} MB",
                    one.total_s,
                    one.downtime_s,
                    one.wire_bytes as f64 / 1e6
                );
                measured.push(one);
                from = hosts.other(from);
            }
        }
        for host in [&hosts.a, &hosts.b] {
            host.destroy_all()?;
        }
    }
    let goals = judge(&measured);
    println!("\n{}", markdown(&measured));
    for goal in &goals {
        println!("{goal}");
    }
    let path = path(NAME);
    save_at(&path, &Figures { measured, goals })?;
    println!("\n{}", path.display());
    Ok(())
}

fn spec(pages_per_s: u32) -> DomainSpec {
    DomainSpec {
        name: DOMAIN.to_owned(),
        virtualization: Virtualization::Pv,
        memory_mib: MEMORY_MIB,
        load_mib: LOAD_MIB,
        pages_per_s,
    }
}

/// Moves the domain to the other host.
fn measure(
    hosts: &XenHosts,
    from: &XenHost,
    contender: &str,
    links: Option<usize>,
) -> Result<Measured> {
    let to = hosts.other(from);
    if let Some(links) = links {
        for host in [from, to] {
            host.kill_agent()?;
            host.start_agent(links)?;
        }
    }
    to.forget(DOMAIN)?;
    let sent = || Ok::<_, LabError>(hosts.a.sent_bytes()? + hosts.b.sent_bytes()?);
    let before = sent()?;
    let moved = match links {
        Some(_) => from.migrate(DOMAIN, to, "")?,
        None => from.migrate_plainly(DOMAIN, to)?,
    };
    if moved.said.status != 0 {
        let reason = format!("{}; {}", moved.said.text, from.agent_log());
        return Err(LabError::Migration { contender: contender.to_owned(), reason });
    }
    let wire_bytes = sent()? - before;
    to.wait_checked(DOMAIN, CHECKS)?;
    let gap_ms = to.beats(DOMAIN)?.iter().map(|beat| beat.gap_ms).max().unwrap_or_default();
    let (total_s, downtime_s) = (moved.took.as_secs_f64(), gap_ms as f64 / 1e3);
    Ok(Measured { total_s, downtime_s, wire_bytes, ..Measured::default() })
}

type Figure = fn(&Measured) -> f64;

/// The figures of a contender with a guest.
fn of(measured: &[Measured], guest: &str, contender: &str, figure: Figure) -> Vec<f64> {
    let is_it = |one: &&Measured| one.guest == guest && one.contender == contender;
    measured.iter().filter(is_it).map(figure).collect()
}

fn judge(measured: &[Measured]) -> Vec<Goal> {
    let goal = |what: &str, contender: &str, figure: Figure, most: f64| {
        let median_of = |contender: &str| median(of(measured, WRITING, contender, figure));
        let ratio = median_of(contender) / median_of(XL);
        Goal {
            goal: format!("{contender}: {what} at most {most} of xl's alone, with a writing guest"),
            reached: ratio.is_finite().then_some(ratio <= most),
            detail: if ratio.is_finite() { format!("{ratio:.2}") } else { String::new() },
        }
    };
    vec![
        goal("time", FOUR, |one| one.total_s, 0.2),
        goal("time", ONE, |one| one.total_s, 0.9),
        goal("downtime", FOUR, |one| one.downtime_s, 0.3),
    ]
}

/// Medians, with the lowest and the highest time.
fn markdown(measured: &[Measured]) -> String {
    let mut text = "| guest | contender | runs | total s | downtime s | wire MB |\n\
                    | --- | --- | --- | --- | --- | --- |\n"
        .to_owned();
    for (guest, _) in GUESTS {
        for (contender, _) in CONTENDERS {
            let all = |figure: Figure| of(measured, guest, contender, figure);
            let times = all(|one| one.total_s);
            let least = times.iter().copied().fold(f64::INFINITY, f64::min);
            let most = times.iter().copied().fold(0.0, f64::max);
            let (runs, span) = (times.len(), format!("{least:.1} to {most:.1}"));
            text += &format!(
                "| {guest} | {contender} | {runs} | {:.1} ({span}) | {:.2} | {:.1} |\n",
                median(times),
                median(all(|one| one.downtime_s)),
                median(all(|one| one.wire_bytes as f64)) / 1e6,
            );
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agents_are_judged_by_a_writing_guest() {
        let one = |guest, contender, total_s, downtime_s| Measured {
            guest,
            contender,
            total_s,
            downtime_s,
            wire_bytes: 2_000_000,
        };
        let measured = [
            one(WRITING, XL, 200.0, 10.0),
            one(WRITING, ONE, 190.0, 9.0),
            one(WRITING, FOUR, 30.0, 1.0),
            one(IDLE, FOUR, 90.0, 9.0),
        ];
        let goals = judge(&measured);
        let reached: Vec<_> = goals.iter().map(|goal| goal.reached).collect();
        assert_eq!(reached, [Some(true), Some(false), Some(true)]);
        assert_eq!(goals[0].detail, "0.15");
        let text = markdown(&measured);
        let row = "| agents, four links | 1 | 90.0 (90.0 to 90.0) | 9.00 | 2.0 |\n";
        assert!(text.contains(&format!("| {IDLE} {row}")), "{text}");
        assert_eq!(judge(&[])[0].reached, None);
    }
}
