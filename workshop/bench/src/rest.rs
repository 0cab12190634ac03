//! What agents keep of their hosts, memory above all, after many moves of every kind, while
//! nothing moves.
//!
//! Two agents live through all of them, so that what each kind leaves adds up.

use std::fmt::Write;
use std::thread;
use std::time::Duration;

use lab_guest::cache::{Layout, Use};
use lab_guest::orders::Orders;
use serde::Serialize;

use super::cache::files::Files;
use super::contender::{Carried, Ground, Mode, carrying, certify};
use super::contest::{path, save_at};
use super::goals::Goal;
use super::image::Image;
use super::scenario::FOOTPRINT;
use lab::agent::{Agent, peer_name};
use lab::error::{LabError, Result};
use lab::guest::{Guest, GuestSpec};
use lab::held::Held;
use lab::hosts::{Host, Hosts, Link, Storage};
use lab::program;
use lab::setup::{self, Kit};

/// Its name among the contenders of `footprint`.
pub const NAME: &str = "at-rest";
/// The most that an agent may keep.
const KEPT_MAX_BYTES: u64 = 64 * MIB;
/// Moves of each kind: some hundred in all.
const MOVES: usize = 15;
const MIB: u64 = 1 << 20;
const SEED: u64 = 13;
/// Bytes of files in the guest's page cache.
const CACHED_BYTES: u64 = 600 * MIB;
/// Rate at which it reads and writes them.
const CACHE_RATE: u64 = 15_000_000;
/// Frequent beats would take CPU time from the moves.
const TICK_MS: u64 = 20;
const DISK: Image =
    Image { bytes: 1024 * MIB, guest_bytes: 64 * MIB, data_bytes: 384 * MIB, seed: SEED };
const GOAL: Duration = Duration::from_millis(300);
const TIMEOUT: Duration = Duration::from_secs(180);
/// Longest time until a moved guest reports again.
const HEARD_MAX: Duration = Duration::from_secs(20);
/// Time for threads and connections of the last move to end.
const SETTLE: Duration = Duration::from_secs(3);

/// Ways to move a VM whose disk both hosts see.
const SHARED: [(&str, &[&str]); 4] = [
    ("multifd", &["--tap", "multifd"]),
    ("classic", &["--tap", "classic"]),
    ("share", &["--share", "host"]),
    ("storage", &["--storage", "auto"]),
];

/// What both agents hold after all moves so far.
#[derive(Clone, Debug, Serialize)]
struct Kept {
    /// The kind of the last moves.
    after: String,
    agents: [Held; 2],
}

/// All figures.
#[derive(Debug, Serialize)]
struct Figures {
    moves_of_each: usize,
    kept: Vec<Kept>,
    goal: Goal,
}

/// Moves VMs in every way, prints what the agents keep, and writes it.
///
/// # Errors
/// If the lab fails, or a VM doesn't arrive.
pub fn run(kit: &Kit) -> Result<()> {
    println!("{FOOTPRINT} {NAME}: what agents keep after {MOVES} moves of each kind");
    let hosts = Hosts::new(Link::one(1000))?;
    let ground = Ground {
        kit,
        hosts: &hosts,
        disk: None,
        downtime_goal: GOAL,
        timeout: TIMEOUT,
        from: None,
    };
    let mut course = Course { ground, agents: start(&hosts)?, kept: Vec::new() };
    course.note("start")?;
    course.shared_disk()?;
    course.own_disk()?;
    course.carried("carried-classic", Mode::Precopy)?;
    course.carried("carried-multifd", Mode::Multifd)?;
    course.note("end")?;
    let goal = judge(&course.kept);
    println!("\n{}\n{goal}", markdown(&course.kept));
    let path = path(&format!("{FOOTPRINT}-{NAME}"));
    save_at(&path, &Figures { moves_of_each: MOVES, kept: course.kept, goal })?;
    println!("{}", path.display());
    Ok(())
}

/// Agents that speak TLS, and carry.
fn start(hosts: &Hosts) -> Result<[Agent; 2]> {
    let tls = certify(hosts)?;
    let start = |host: &Host| carrying(hosts, host, "", &[tls[0].as_str(), tls[1].as_str()]);
    Ok([start(&hosts.a)?, start(&hosts.b)?])
}

struct Course<'g> {
    ground: Ground<'g>,
    agents: [Agent; 2],
    kept: Vec<Kept>,
}

impl Course<'_> {
    /// A VM that is mostly page cache, on a storage host's disk.
    fn shared_disk(&mut self) -> Result<()> {
        let Ground { kit, hosts, .. } = self.ground;
        let layout = Layout { kind: Use::Web, cached_bytes: CACHED_BYTES, seed: SEED };
        let files = Files::make(&layout)?;
        let storage = Storage::join(hosts)?;
        storage.serve(&files.image(), None)?;
        let orders = Orders {
            cache: layout.kind,
            cache_bytes: CACHED_BYTES,
            cache_rate: CACHE_RATE,
            ..orders()
        };
        let mut spec = GuestSpec::new("cached", "1G", orders);
        spec.initrd = Some(setup::helper_initrd(kit)?);
        spec.extra.extend(Storage::arguments());
        let guest = self.boot(&spec)?;
        let mut at = 0;
        for (kind, arguments) in SHARED {
            for _ in 0..MOVES {
                at = self.migrate(&guest, at, &[&["--shared-disks"], arguments].concat())?;
            }
            self.note(kind)?;
        }
        self.stop(&guest, at)
    }

    /// A VM that takes its disk with it.
    fn own_disk(&mut self) -> Result<()> {
        let hosts = self.ground.hosts;
        DISK.make(&hosts.a)?;
        let orders = Orders { disk_bytes: DISK.guest_bytes, disk_rate: 5_000_000, ..orders() };
        let mut spec = GuestSpec::new("disk", "512M", orders);
        spec.extra.extend(Image::arguments(&hosts.a));
        let guest = self.boot(&spec)?;
        let mut at = 0;
        for nth in 0..MOVES {
            let room = if nth == 0 { "--create-disks" } else { "--overwrite-disks" };
            at = self.migrate(&guest, at, &["--disks", "all", room])?;
        }
        self.note("disk")?;
        self.stop(&guest, at)
    }

    /// A VM that no agent manages.
    fn carried(&mut self, kind: &str, mode: Mode) -> Result<()> {
        let spec = GuestSpec::new(kind, "512M", orders());
        let (mut vm, guest) = Carried::start(&self.ground, mode, &spec)?;
        for nth in 0..MOVES {
            vm.migrate(&self.ground, (nth + 1) % 2, |there| guest.expect_on(there))?;
            arrived(kind, &guest)?;
        }
        self.note(kind)
    }

    fn boot(&self, spec: &GuestSpec) -> Result<Guest> {
        let Ground { kit, hosts, .. } = self.ground;
        let argv = spec.argv(kit, &kit.qemu);
        let mut run = self.agents[0].command(&hosts.a, &["run", &spec.name, "--"]);
        program::output(run.args(&argv))?;
        Guest::meet(spec.clone(), &hosts.a)
    }

    /// Moves a guest to the other host. Returns where it is then.
    fn migrate(&self, guest: &Guest, at: usize, arguments: &[&str]) -> Result<usize> {
        let hosts = [&self.ground.hosts.a, &self.ground.hosts.b];
        let to = 1 - at;
        guest.expect_on(hosts[to])?;
        let name = &guest.spec.name;
        let there = peer_name(self.ground.hosts, hosts[to]);
        let mut command = self.agents[at].command(hosts[at], &["migrate", name, there]);
        program::output(command.args(arguments))?;
        arrived(name, guest)?;
        Ok(to)
    }

    fn stop(&self, guest: &Guest, at: usize) -> Result<()> {
        let host = [&self.ground.hosts.a, &self.ground.hosts.b][at];
        let name = &guest.spec.name;
        program::output(&mut self.agents[at].command(host, &["stop", name, "--force"])).map(drop)
    }

    fn note(&mut self, after: &str) -> Result<()> {
        thread::sleep(SETTLE);
        let hosts = self.ground.hosts;
        let [a, b] = &self.agents;
        let agents = [Held::of(a, &hosts.a)?, Held::of(b, &hosts.b)?];
        println!("  {after:16} {}; {}", agents[0], agents[1]);
        self.kept.push(Kept { after: after.to_owned(), agents });
        Ok(())
    }
}

fn orders() -> Orders {
    Orders {
        seed: SEED,
        random_bytes: 128 * MIB,
        text_bytes: 64 * MIB,
        working_set_bytes: 32 * MIB,
        rate: 2_000_000,
        tick_ms: TICK_MS,
        ..Orders::default()
    }
}

fn arrived(name: &str, guest: &Guest) -> Result<()> {
    guest.wait_beat(HEARD_MAX)?;
    let checked = guest.check()?;
    if checked.wrong > 0 || checked.pages == 0 {
        let (contender, reason) = (name.to_owned(), format!("the guest found {checked:?}"));
        return Err(LabError::Migration { contender, reason });
    }
    Ok(())
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / MIB as f64
}

fn judge(kept: &[Kept]) -> Goal {
    let most = kept.iter().flat_map(|kept| kept.agents).map(|held| held.memory_bytes).max();
    Goal {
        goal: format!("an agent at rest keeps at most {} MiB", KEPT_MAX_BYTES / MIB),
        reached: most.map(|most| most <= KEPT_MAX_BYTES),
        detail: most.map_or_else(String::new, |most| format!("at most {:.1} MiB", mib(most))),
    }
}

fn markdown(kept: &[Kept]) -> String {
    let mut text = "| after | host-a's agent | host-b's agent |\n| --- | --- | --- |\n".to_owned();
    for Kept { after, agents: [a, b] } in kept {
        let _ = writeln!(text, "| {after} | {a} | {b} |");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_agent_that_keeps_too_much_misses_the_goal() {
        let held = |memory_bytes| Held { memory_bytes, descriptors: 20, ..Held::default() };
        let kept = |bytes| Kept { after: "disk".to_owned(), agents: [held(MIB), held(bytes)] };
        assert_eq!(judge(&[]).reached, None);
        assert_eq!(judge(&[kept(KEPT_MAX_BYTES), kept(0)]).reached, Some(true));
        let missed = judge(&[kept(0), kept(KEPT_MAX_BYTES + MIB / 2), kept(0)]);
        assert!(missed.to_string().ends_with("NOT REACHED (at most 64.5 MiB)"), "{missed}");
        let table = markdown(&[kept(MIB / 2)]);
        assert!(table.ends_with("| 20 descriptors, 0 threads, 0 files, 0.5 MiB |\n"), "{table}");
    }
}
