//! CPU time of a page's path without QEMU: a generator writes multifd packets as QEMU does, and the
//! real tap, lanes, receivers and placer carry them over loopback into RAM. The result is by stage,
//! per gigabyte of RAM.
//!
//! `direct` does for comparison what QEMU does without Droveway: each channel's packets go into a
//! TCP connection, and from there into RAM.

mod destination;
mod direct;
mod run;
mod source;

use std::time::Instant;

use identity::{Authority, CertificateRequest, Identity, Security, Subject};
use lab::error::{LabError, Result, SystemContext};
use page::Encoding;

use self::destination::Destination;
use self::run::{CHANNELS, RAM_BYTES, Run, Stages};
use self::source::Source;

/// The name of the benchmark.
pub const NAME: &str = "path";
/// What it measures.
pub const ABOUT: &str = "CPU time by stage from QEMU's socket into RAM, without QEMU";

/// The path that QEMU takes without Droveway.
const DIRECT: &str = "direct";
const LANES: [usize; 4] = [1, 2, 4, 8];

/// How the lanes carry content.
#[derive(Clone)]
struct Way {
    name: &'static str,
    encoding: Encoding,
    /// Of the source and the destination.
    security: [Security; 2],
}

/// Runs the benchmark and prints a table. `only` names the ways that take part; if it is empty, all
/// do.
///
/// # Errors
/// If the system gives no sockets, threads or memory, or a page comes out wrong.
pub fn run(runs: u32, only: &[String]) -> Result<()> {
    let takes_part = |name: &str| only.is_empty() || only.iter().any(|one| one == name);
    println!("{NAME}: {ABOUT}");
    println!("{} MiB, {CHANNELS} channels; medians of {runs} runs", RAM_BYTES >> 20);
    println!();
    println!(
        "| way | lanes | GB/s | CPU s/GB | generator | tap | lanes | receivers |\n\
         | --- | --- | --- | --- | --- | --- | --- | --- |"
    );
    let ram = source::ram(RAM_BYTES);
    if takes_part(DIRECT) {
        let each: Result<Vec<Run>> = (0..runs).map(|_| direct::run(&ram)).collect();
        print(DIRECT, CHANNELS.into(), each?);
    }
    for way in ways()?.into_iter().filter(|way| takes_part(way.name)) {
        for lanes in LANES {
            let each: Result<Vec<Run>> = (0..runs).map(|_| one(&ram, &way, lanes)).collect();
            print(way.name, lanes, each?);
        }
    }
    Ok(())
}

fn ways() -> Result<[Way; 3]> {
    let plain = [Security::Plaintext, Security::Plaintext];
    Ok([
        Way { name: "plain", encoding: Encoding::Raw, security: plain.clone() },
        Way { name: "tls", encoding: Encoding::Raw, security: certified()? },
        Way { name: "zstd", encoding: Encoding::Zstd, security: plain },
    ])
}

/// Credentials of two hosts, from one CA.
fn certified() -> Result<[Security; 2]> {
    let dir = tempfile::tempdir().doing("make a directory for certificates")?;
    let wrong = |error: &dyn std::fmt::Display| {
        LabError::Unsupported(format!("certificates can't be made: {error}"))
    };
    let ca = dir.path().join("ca");
    Authority::create(&ca, 1).map_err(|error| wrong(&error))?;
    let authority = Authority::open(&ca).map_err(|error| wrong(&error))?;
    let identity = |name: &str| {
        let subject = Subject::host(name).map_err(|error| wrong(&error))?;
        let request =
            CertificateRequest { out: dir.path().join(name), subject, days: 1, replace: false };
        let files = authority.issue(&request).map_err(|error| wrong(&error))?.files;
        let identity = Identity::load(name, &files).map_err(|error| wrong(&error))?;
        Ok(Security::Tls(std::sync::Arc::new(identity)))
    };
    Ok([identity("source")?, identity("destination")?])
}

fn one(ram: &[u8], way: &Way, lanes: usize) -> Result<Run> {
    let [ours, theirs] = way.security.clone();
    let destination = Destination::start(theirs)?;
    let source = Source { endpoint: destination.address(), security: ours, lanes };
    let began = Instant::now();
    let sent = source.send(ram, way.encoding)?;
    let took = began.elapsed();
    let receivers = destination.end(ram)?;
    Ok(Run { took, stages: Stages { receivers, ..sent } })
}

fn print(name: &str, lanes: usize, mut runs: Vec<Run>) {
    runs.sort_by_key(|run| run.took);
    let Some(run) = runs.get(runs.len() / 2) else { return };
    let gigabytes = RAM_BYTES as f64 / 1e9;
    let Stages { generator, tap, lanes: sending, receivers } = run.stages;
    let each = [run.stages.sum(), generator, tap, sending, receivers]
        .map(|time| format!("{:.3}", time.as_secs_f64() / gigabytes));
    let rate = gigabytes / run.took.as_secs_f64();
    println!("| {name} | {lanes} | {rate:.2} | {} |", each.join(" | "));
}
