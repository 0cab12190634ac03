//! The lab's command.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use bench::cache::scenarios::{Links, MBIT, San};
use bench::gang::conditions::Conditions;
use bench::result::{Outcome, Run};
use bench::scenario::Scenario;
use bench::{apps, cache, contest, gang, neighbour, plain_tcp, scenario, sweep, visitors, writers};
use bench::{demo, loads, papers, path, relay, rest, tracking, upgrade, xen};
use clap::{Parser, Subcommand};
use lab::error::LabError;
use lab::field::{Machine, Snapshot};
use lab::setup::{Kit, Release};
use lab::{hosts, program, setup, unprivileged};
use tokio::signal::unix::{SignalKind, signal};

/// Hosts, guests and races on one machine.
#[derive(Parser)]
struct Options {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Install and make what the lab needs.
    Setup {
        /// What only tests need as well: a QEMU of each release, libvirt, a browser.
        #[arg(long)]
        tests: bool,
        /// A Debian that has booted, for the tests of the field lab.
        #[arg(long)]
        field: bool,
        /// An NFS server, and QEMU's client of one, for a test.
        #[arg(long)]
        nfs: bool,
        /// Xen, for emulated hosts.
        #[arg(long)]
        xen: bool,
    },
    /// Print where the lab's QEMU, kernel and initramfs are.
    Env,
    /// Remove what a killed run left behind.
    Clean {
        /// Remove what was unpacked for the lab as well.
        #[arg(long)]
        store: bool,
    },
    /// Move a writing VM there and back, and race QEMU's own migration.
    Demo,
    /// Move all VMs of a rack to another one and back, with shared content and
    /// without.
    DemoGang,
    /// Run a benchmark; without a name, list them.
    Bench {
        /// Name of the benchmark.
        name: Option<String>,
        /// How often each contender runs.
        #[arg(long, default_value_t = 5)]
        runs: u32,
        /// Only the contenders named so; may be repeated.
        #[arg(long)]
        only: Vec<String>,
        /// Only these points of a sweep, such as 500x2; may be repeated.
        #[arg(long)]
        at: Vec<String>,
        /// With the QEMU of this release, such as 11.1.
        #[arg(long)]
        qemu: Option<String>,
        #[command(flatten)]
        conditions: Conditions,
        #[command(flatten)]
        links: Links,
    },
    /// Run the papers' own workloads, with the contenders that matter most.
    BenchApps {
        /// How often each contender runs.
        #[arg(long, default_value_t = 2)]
        runs: u32,
        /// Print only what would run, and what it should take.
        #[arg(long)]
        plan: bool,
    },
    /// Print what a QEMU writes into RAM that it shares with a VM's former QEMU, before the VM runs
    /// in it.
    Loads {
        /// Only with these devices; may be repeated.
        #[arg(long)]
        only: Vec<String>,
    },
    /// Predict what a gang of many VMs on many hosts would take, in simulated time.
    Simulate(Box<simulator::Options>),
    /// Write what the lab's own guests contain, for `simulate --trace`.
    Trace {
        /// The file.
        file: PathBuf,
        #[command(flatten)]
        conditions: Conditions,
    },
    /// Run a program where hosts can be made: as root, else in a user namespace.
    AsRoot {
        /// Find or make what the lab needs first, once for all programs that it starts.
        #[arg(long)]
        kit: bool,
        /// The program and its arguments.
        #[arg(last = true, required = true)]
        argv: Vec<OsString>,
    },
    /// Be the first program in a pod (for tests with KubeVirt).
    #[command(hide = true)]
    Launcher {
        /// Socket to listen on.
        socket: PathBuf,
        /// Program to start, and its arguments.
        #[arg(last = true, required = true)]
        argv: Vec<OsString>,
    },
    /// Receive one TCP stream (for the benchmark `line`).
    #[command(hide = true)]
    TcpSink {
        /// Port to listen on.
        port: u16,
    },
    /// Send one TCP stream, and print how long it took.
    #[command(hide = true)]
    TcpSource {
        /// Address of the receiver.
        address: String,
        /// Bytes to send.
        bytes: u64,
    },
    /// Relay what QEMU sends (for the contender `relay`).
    #[command(hide = true)]
    RelaySource {
        /// Address of the destination's end.
        address: String,
    },
    /// Relay it into the destination's QEMU.
    #[command(hide = true)]
    RelayDestination {
        /// Port to listen on.
        port: u16,
        #[command(flatten)]
        ram: relay::Ram,
    },
    /// Read what a program in a guest reports (for `apps-*`).
    #[command(hide = true)]
    AppProgress {
        /// Port to listen on.
        port: u16,
    },
    /// Be the clients of the web server in a guest, and print how much was answered (for
    /// `apps-nginx`).
    #[command(hide = true)]
    AppWeb,
    /// Serve a web load (for the benchmark `neighbour-net`).
    #[command(hide = true)]
    NeighbourServer {
        /// Port to listen on.
        port: u16,
    },
    /// Be the clients of a web load, and print how many bytes arrived.
    #[command(hide = true)]
    NeighbourClients {
        /// Address of the server.
        address: String,
        /// Bytes to request per second.
        bytes_per_s: u64,
    },
    /// Receive a load (for the benchmark `gang-background`).
    #[command(hide = true)]
    LoadSink {
        /// Port to listen on.
        port: u16,
    },
    /// Send a load.
    #[command(hide = true)]
    LoadSource {
        /// Address of the receiver.
        address: String,
        /// Bytes to send per second.
        bytes_per_s: u64,
    },
    /// Use the server in a guest, and print what was answered (for `web`).
    #[command(hide = true)]
    Visitors,
    /// Keep all CPUs busy (for the benchmark `neighbour-cpu`).
    #[command(hide = true)]
    NeighbourComputing,
}

fn main() -> ExitCode {
    if let Err(error) = clean_when_interrupted() {
        eprintln!("lab: Ctrl-C will leave its hosts behind until the next run: {error}");
    }
    match run(&Options::parse().action) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("lab: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Removes the lab's hosts, and what runs on them, on Ctrl-C and `kill`, which end the lab without
/// unwinding.
fn clean_when_interrupted() -> std::io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let (mut interrupt, mut end) = {
        let _inside = runtime.enter();
        (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?)
    };
    let wait = move || {
        runtime.block_on(async {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = end.recv() => {}
            }
        });
        if let Err(error) = hosts::abandon() {
            eprintln!("lab: {error}");
        }
        // As a shell reports a program that Ctrl-C ended.
        std::process::exit(130);
    };
    std::thread::Builder::new().name("interrupt".to_owned()).spawn(wait).map(drop)
}

/// Makes the guest of the field lab's tests.
fn field_guest(kit: &Kit) -> Result<(), LabError> {
    let image = setup::field_image(Release::Bookworm)?;
    Snapshot::of(kit, image, Machine::Virtio, kit.own_qemu()).map(drop)
}

fn run(action: &Action) -> Result<ExitCode, LabError> {
    let system = |error| LabError::System { action: "be a part of a benchmark", error };
    match action {
        Action::Setup { tests, field, nfs, xen: with_xen } => {
            let kit = setup::ensure()?;

            if *tests {
                setup::helper_initrd(&kit)?;
                setup::qemus(&kit)?;
                setup::libvirts(&kit)?;
                setup::apparmor()?;
                setup::nft()?;
                setup::chromium()?;
            }
            if *nfs && let Err(error) = setup::nfs(&kit) {
                eprintln!("setup: the test with images on NFS is left out: {error}");
            }
            if *field && let Err(error) = field_guest(&kit) {
                eprintln!("setup: tests of the field lab are left out: {error}");
            }
            if *with_xen {
                setup::xen()?;
            }
        }
        Action::Env => println!("{}", setup::ensure()?),
        Action::Clean { store: false } => hosts::clean()?,
        Action::Clean { store: true } => setup::remove_store()?,
        Action::Simulate(options) => options.run(gang::compare)?,
        Action::BenchApps { runs, plan: true } => println!("{}", papers::plan(*runs)),
        Action::Demo
        | Action::DemoGang
        | Action::Trace { .. }
        | Action::BenchApps { .. }
        | Action::Bench { name: Some(_), .. }
            if !program::root() =>
        {
            // Before the user namespace is entered: the real root installs what is missing.
            let kit = setup::ensure()?;
            if let Action::Bench { qemu: Some(release), .. } = action {
                setup::with_release(kit, release)?;
            }
            if matches!(action, Action::Bench { name: Some(name), .. } if name == xen::NAME) {
                setup::xen()?;
            }
            let argv: Vec<OsString> = std::env::args_os().collect();
            println!("Not root: the lab works in a user namespace.");
            return unprivileged::run(&argv, true);
        }
        Action::Launcher { socket, argv } => {
            lab::libvirt::launch(socket, argv).map_err(system)?;
        }
        Action::AsRoot { kit, argv } => return unprivileged::run(argv, *kit),
        Action::Demo => return demo::run(),
        Action::DemoGang => return demo::gang::run(),
        Action::Trace { file, conditions } => gang::record(file, conditions)?,
        Action::Bench { name: None, .. } => {
            let scenarios = scenario::all();
            let contests = scenarios.iter().map(|one| (one.name, one.about));
            let sweeps = writers::sweeps();
            let sweeps = sweeps.iter().map(|one| (one.name, one.about));
            let gangs = gang::scenarios::all();
            let gangs = gangs.iter().map(|one| (one.name, one.about));
            let caches = cache::scenarios::all();
            let caches = caches.iter().map(|one| (one.name, one.about));
            let caches = caches.chain([(cache::helper::NAME, cache::helper::ABOUT)]);
            let caches =
                caches.chain([(path::NAME, path::ABOUT), (tracking::NAME, tracking::ABOUT)]);
            let caches = caches.chain([(upgrade::NAME, upgrade::ABOUT), (xen::NAME, xen::ABOUT)]);
            let apps = apps::all();
            let apps = apps.iter().map(|one| (one.name, one.about));
            let caches = caches.chain(apps);
            for (name, about) in contests.chain(sweeps).chain(gangs).chain(caches) {
                println!("{name:15} {about}");
            }
        }
        Action::Bench { name: Some(name), runs, only, .. } if name == path::NAME => {
            path::run(*runs, only)?;
        }
        Action::Bench { name: Some(name), runs, only, at, qemu, conditions, links } => {
            let kit = setup::ensure()?;
            let kit = match qemu {
                Some(release) => setup::with_release(kit, release)?,
                None => kit,
            };
            return bench(&kit, name, *runs, only, at, conditions, *links).map(ended);
        }
        Action::BenchApps { runs, plan: false } => return bench_apps(*runs).map(ended),
        Action::Loads { only } => loads::run(only)?,
        Action::TcpSink { port } => plain_tcp::sink(*port).map_err(system)?,
        Action::TcpSource { address, bytes } => {
            plain_tcp::source(address, *bytes).map_err(system)?;
        }
        Action::RelaySource { address } => relay::source(address).map_err(system)?,
        Action::RelayDestination { port, ram } => {
            relay::destination(*port, ram).map_err(system)?;
        }
        Action::AppProgress { port } => apps::progress::listen(*port).map_err(system)?,
        Action::AppWeb => apps::web::visit().map_err(system)?,
        Action::NeighbourServer { port } => neighbour::server(*port).map_err(system)?,
        Action::NeighbourClients { address, bytes_per_s } => {
            neighbour::clients(address, *bytes_per_s).map_err(system)?;
        }
        Action::LoadSink { port } => gang::load::sink(*port).map_err(system)?,
        Action::LoadSource { address, bytes_per_s } => {
            gang::load::source(address, *bytes_per_s).map_err(system)?;
        }
        Action::Visitors => visitors::visit().map_err(system)?,
        Action::NeighbourComputing => neighbour::computing().map_err(system)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs all parts of the papers' workloads; returns whether all guests that arrived were intact.
fn bench_apps(runs: u32) -> Result<bool, LabError> {
    println!("{}", papers::plan(runs));
    let began = Instant::now();
    let kit = setup::ensure()?;
    apps::make(&kit)?;
    let texts = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    let (conditions, links) = (Conditions::default(), Links { mbit: MBIT, san: San::Same });
    let mut right = true;
    for part in &papers::PARTS {
        if !part.fits(runs, began.elapsed()) {
            println!("{0}: left out, for want of time; `make bench-{0}` runs it\n", part.name);
            continue;
        }
        let (only, at) = (texts(part.only), texts(part.at));
        right &= bench(&kit, part.name, runs, &only, &at, &conditions, links)?;
        let (took, should) = (began.elapsed().as_secs_f64() / 60.0, papers::take(runs));
        println!("after {took:.0} of some {:.0} min\n", should.as_secs_f64() / 60.0);
    }
    Ok(right)
}

/// Runs a benchmark; returns whether all guests that arrived were intact.
fn bench(
    kit: &Kit,
    name: &str,
    runs: u32,
    only: &[String],
    at: &[String],
    conditions: &Conditions,
    links: Links,
) -> Result<bool, LabError> {
    if name == cache::helper::NAME {
        cache::helper::run(kit, runs)?;
        return Ok(true);
    }
    if name == tracking::NAME {
        tracking::run(kit, runs)?;
        return Ok(true);
    }
    if name == xen::NAME {
        xen::run(kit, runs)?;
        return Ok(true);
    }
    if name == upgrade::NAME {
        return Ok(all_right(&upgrade::run(kit, runs, only)?));
    }
    let contest = scenario::all().into_iter().find(|one| one.name == name);
    let sweep = writers::sweeps().into_iter().find(|one| one.name == name);
    let gang = gang::scenarios::all().into_iter().find(|one| one.name == name);
    let cache = cache::scenarios::all().into_iter().find(|one| one.name == name);
    if let Some(app) = apps::all().into_iter().find(|one| one.name == name) {
        return Ok(all_right(&apps::run(kit, app, runs, only)?));
    }
    let right = match (contest, sweep, gang, cache) {
        (Some(contest), ..) if contest.name == scenario::FOOTPRINT => {
            footprint(kit, &contest, runs, only)?
        }
        (Some(contest), ..) => all_right(&contest::run(kit, &contest, runs, only)?),
        (.., Some(cache)) => all_right(&cache::run(kit, &cache, links, runs, only)?),
        (_, None, Some(gang), _) => all_right(&gang::run(kit, gang, conditions, runs, only)?),
        (_, Some(sweep), ..) => {
            let outcome = sweep::run(kit, &sweep, runs, only, at)?;
            outcome.points.iter().all(|point| all_right(&point.outcome))
        }
        (None, None, None, None) => {
            let text = format!("there is no benchmark {name}; `lab bench` lists them");
            return Err(LabError::Unsupported(text));
        }
    };
    Ok(right)
}

/// A benchmark has ended; `right` if all guests that arrived were intact.
fn ended(right: bool) -> ExitCode {
    if right {
        return ExitCode::SUCCESS;
    }
    eprintln!("lab: a guest's memory or disk came out wrong");
    ExitCode::FAILURE
}

/// Whether all guests that arrived were intact.
fn all_right(outcome: &Outcome) -> bool {
    let is_right = |run: &Run| !run.ok || (run.intact && run.disk_intact.unwrap_or(true));
    outcome.contenders.values().flat_map(|contender| &contender.runs).all(is_right)
}

/// Agents' memory while a VM moves, and at rest after many moves.
fn footprint(kit: &Kit, contest: &Scenario, runs: u32, only: &[String]) -> Result<bool, LabError> {
    let (at_rest, moving): (Vec<_>, Vec<_>) =
        only.iter().cloned().partition(|name| name == rest::NAME);
    let mut right = true;
    if only.is_empty() || !moving.is_empty() {
        right = all_right(&contest::run(kit, contest, runs, &moving)?);
    }
    if only.is_empty() || !at_rest.is_empty() {
        rest::run(kit)?;
    }
    Ok(right)
}
