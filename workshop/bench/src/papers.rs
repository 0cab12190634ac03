//! Benchmarks with the papers' own workloads, one after the other: `make bench-apps`. Of each the
//! contenders take part that matter most, so that all of it ends within an hour.

use std::fmt::Write as _;
use std::time::Duration;

/// A benchmark, or a part of it.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// The benchmark's name.
    pub name: &'static str,
    /// The contenders that take part.
    pub only: &'static [&'static str],
    /// The points that are visited, if it is a sweep.
    pub at: &'static [&'static str],
    /// What one run of a contender takes with two cores under TCG: with the guest's start and its
    /// check, and until those give up that don't finish.
    run_s: u32,
}

const NICS: &[&str] = &["qemu-precopy", "qemu-zstd", "qemu-autoconverge", "droveway"];
const MIRRORS: &[&str] = &["qemu-mirror-precopy", "qemu-mirror-zstd", "droveway"];
const CACHE: &[&str] = &["qemu-zstd", "droveway-adaptive"];
/// What all of it may take, with the guests that have to be made first.
const HOUR: Duration = Duration::from_secs(3600);

const fn part(name: &'static str, only: &'static [&'static str], run_s: u32) -> Part {
    Part { name, only, at: &[], run_s }
}

/// All parts, in the order in which they run.
pub static PARTS: [Part; 13] = [
    part("apps-memcached", NICS, 60),
    part("apps-postgres", &["qemu-precopy", "qemu-zstd", "droveway"], 60),
    part("apps-dbench", MIRRORS, 60),
    part("apps-sysbench", &["qemu-zstd", "droveway"], 45),
    part("apps-nginx", &["qemu-zstd", "droveway"], 45),
    part("neighbour-vm", &["qemu-multifd", "droveway"], 35),
    part("neighbour-nics", &["qemu-multifd", "droveway"], 30),
    part("requests", &["stays", "qemu-autoconverge", "droveway"], 85),
    Part {
        at: &["1000x2"],
        ..part("writer", &["qemu-autoconverge", "droveway", "droveway-c60", "droveway-c90"], 35)
    },
    part("apps-cache-postmark", CACHE, 40),
    part("apps-cache-postgres", CACHE, 40),
    part("gang-apps", &["qemu-precopy", "droveway-off", "droveway-rack"], 60),
    // Its contenders are two settings of the agent.
    part("tracking", &["0", "default"], 32),
];

impl Part {
    fn runs(&self, rounds: u32) -> u32 {
        rounds.saturating_mul(u32::try_from(self.only.len()).unwrap_or(u32::MAX))
    }

    /// What so many rounds should take.
    #[must_use]
    pub fn takes(&self, rounds: u32) -> Duration {
        Duration::from_secs(u64::from(self.run_s) * u64::from(self.runs(rounds)))
    }

    /// Whether it should end in time when this much of it has passed. More rounds than fit in an
    /// hour have all the time that they need.
    #[must_use]
    pub fn fits(&self, rounds: u32, passed: Duration) -> bool {
        passed + self.takes(rounds) <= take(rounds).max(HOUR)
    }
}

/// What so many rounds of all parts should take.
#[must_use]
pub fn take(rounds: u32) -> Duration {
    PARTS.iter().map(|part| part.takes(rounds)).sum()
}

/// What runs, and what it should take, for people.
#[must_use]
pub fn plan(rounds: u32) -> String {
    let minutes = |time: Duration| time.as_secs_f64() / 60.0;
    let mut text = String::new();
    for part in &PARTS {
        // Into a string nothing fails.
        let _ = writeln!(
            text,
            "  {:20} {:3} runs, {:4.1} min",
            part.name,
            part.runs(rounds),
            minutes(part.takes(rounds))
        );
    }
    text + &format!("  some {:.0} min in all, once guests are made", minutes(take(rounds)))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use lab::setup::repository;

    use super::*;
    use crate::{apps, cache, gang, path, scenario, tracking, upgrade, writers, xen};

    /// The names of all benchmarks that the lab runs.
    fn benchmarks() -> Vec<&'static str> {
        let contests = scenario::all().into_iter().map(|one| one.name);
        let sweeps = writers::sweeps().into_iter().map(|one| one.name);
        let gangs = gang::scenarios::all().into_iter().map(|one| one.name);
        let caches = cache::scenarios::all().into_iter().map(|one| one.name);
        let apps = apps::all().into_iter().map(|one| one.name);
        let others = [cache::helper::NAME, path::NAME, tracking::NAME, upgrade::NAME, xen::NAME];
        contests.chain(sweeps).chain(gangs).chain(caches).chain(apps).chain(others).collect()
    }

    /// The contenders of a benchmark.
    fn contenders(name: &str) -> Vec<String> {
        let contest = scenario::all().into_iter().find(|one| one.name == name);
        let contest = contest.map(|one| one.contenders());
        let mut names: Vec<_> =
            contest.iter().flatten().map(|contender| contender.name()).collect();
        let points = writers::sweeps().into_iter().filter(|one| one.name == name);
        for point in points.flat_map(|sweep| sweep.points) {
            names.extend(point.scenario.contenders().iter().map(|one| one.name()));
        }
        let gangs = gang::scenarios::all().into_iter().filter(|one| one.name == name);
        for gang in gangs {
            names.extend(gang.contenders().iter().map(|one| one.name()));
        }
        for app in apps::all().into_iter().filter(|one| one.name == name) {
            names.extend(app.contenders().iter().map(|one| one.name()));
        }
        names
    }

    #[test]
    fn two_rounds_end_within_an_hour() {
        assert!(take(2) <= HOUR, "{}", plan(2));
        assert!(plan(2).contains("min in all"));
        let two_min = part("", &["0", "5%"], 30);
        assert!(two_min.fits(2, HOUR - Duration::from_secs(120)));
        assert!(!two_min.fits(2, HOUR - Duration::from_secs(119)));
        assert!(two_min.fits(5, HOUR));
    }

    #[test]
    fn all_that_takes_part_exists() {
        for part in PARTS.iter().filter(|part| part.name != tracking::NAME) {
            let known = contenders(part.name);
            for name in part.only {
                assert!(known.iter().any(|known| known == name), "{}: {name}", part.name);
            }
        }
        let points = writers::sweeps().into_iter().flat_map(|sweep| sweep.points);
        let points: Vec<_> = points.map(|point| point.name()).collect();
        let at = PARTS.iter().flat_map(|part| part.at);
        assert!(at.into_iter().all(|at| points.iter().any(|point| point == at)), "{points:?}");
    }

    /// Each command of the pages that researchers open first is one that there is.
    #[test]
    fn every_benchmark_that_is_documented_exists() {
        let read = |path: &str| fs::read_to_string(repository().join(path)).unwrap();
        let (known, makefile) = (benchmarks(), read("Makefile"));
        for page in ["docs/PAPERS.md", "docs/BENCHMARKS.md"] {
            let text = read(page);
            let commands = text.split("`make bench-").skip(1);
            let names = commands.map(|rest| rest.split(['`', ' ']).next().unwrap_or_default());
            let names: Vec<_> = names.filter(|name| *name != "NAME").collect();
            assert!(names.len() > 20, "{page}: {names:?}");
            for name in names {
                let of_make = makefile.contains(&format!("\nbench-{name}:"));
                assert!(known.contains(&name) || of_make, "{page}: there is no bench-{name}");
            }
        }
    }
}
