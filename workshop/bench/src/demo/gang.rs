//! `make demo-gang`: all VMs of a rack move to another rack with sharing, where content that
//! several VMs have is sent once, and back without sharing.

use std::io::{IsTerminal, Write};
use std::process::{Child, ExitCode, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use simulator::Share;

use crate::contender::gang::sharing;
use crate::gang::conditions::Conditions;
use crate::gang::scenarios;
use lab::agent::{Agent, agents};
use lab::error::{LabError, Result, SystemContext};
use lab::guest::Guest;
use lab::hosts::{Crossed, Layout, RackHost, Racks};
use lab::program;
use lab::setup::{self, Kit};

const VMS: u8 = 4;
/// How often the progress of several commands is shown.
const SHOW_EVERY: Duration = Duration::from_millis(500);
/// A guest that moved reports again.
const HEARD_MAX: Duration = Duration::from_secs(20);

/// Figures of emptying a rack.
struct Left {
    took: Duration,
    crossed: Crossed,
    longest_silence: Duration,
}

/// Racks, their agents, and the VMs.
struct Place<'r> {
    racks: &'r Racks,
    agents: Vec<Agent>,
    guests: Vec<Guest>,
}

/// Moves all VMs of one of two racks to the other, and back.
///
/// # Errors
/// If the lab fails.
pub fn run() -> Result<ExitCode> {
    let kit = setup::ensure()?;
    let layout = Layout { source_racks: 1, ..Layout::default() };
    let racks = Racks::new(layout)?;
    println!(
        "Two racks of two hosts each (network namespaces): {} Mbit/s to each host, {} Mbit/s \
         between the racks.\nQEMU {} with {}.\n",
        layout.edge_mbit_per_s, layout.core_mbit_per_s, kit.qemu_version, kit.accelerator
    );
    let place = Place::furnish(&kit, &racks)?;
    let there = place.empty(&racks.sources(), &racks.targets(), widest()?)?;
    println!("\nThe same VMs go back, each by itself (--share off).");
    let back = place.empty(&racks.targets(), &racks.sources(), Share::Off)?;

    println!("\nIn short");
    for (how, left) in [("sharing", &there), ("without", &back)] {
        println!(
            "  {how:8} {VMS} VMs moved in {:.1} s, {:.0} MB between the racks, longest downtime \
             {:.0} ms",
            left.took.as_secs_f64(),
            left.crossed.bytes() as f64 / 1e6,
            left.longest_silence.as_secs_f64() * 1e3,
        );
    }
    let (with, without) = (there.crossed.bytes() as f64, back.crossed.bytes() as f64);
    println!(
        "  saved    {:.0} MB of {:.0} between the racks ({:.0} %)",
        (without - with) / 1e6,
        without / 1e6,
        (1.0 - with / without.max(1.0)) * 100.0
    );
    let (pages, wrong) = place.check()?;
    println!("  {pages} pages checked by the guests themselves, {wrong} wrong");
    println!("{}", if wrong == 0 { "It works." } else { "IT DOES NOT WORK." });
    Ok(if wrong == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

impl<'r> Place<'r> {
    /// Starts agents and VMs, two on each host of the first rack.
    fn furnish(kit: &Kit, racks: &'r Racks) -> Result<Self> {
        let mut place = Self { racks, agents: agents(racks)?, guests: Vec::new() };
        let all = scenarios::all();
        let idle = all.first().ok_or_else(|| LabError::Missing { what: "VMs".to_owned() })?;
        let members = idle.members(racks, &Conditions { vms: VMS, ..Conditions::default() });
        for member in &members {
            let (name, host) = (&member.spec.name, &member.from.host);
            println!("{}$ droveway run {name} -- qemu-system-x86_64 -m 256M ...", member.from.name);
            place.guests.push(Guest::listen(member.spec.clone(), host)?);
            let mut run = place.agent(member.from)?.command(host, &["run", name, "--"]);
            program::output(run.args(member.spec.argv(kit, &kit.qemu)))?;
        }
        for (guest, member) in place.guests.iter().zip(&members) {
            guest.wait_boot(&member.from.host)?;
        }
        Ok(place)
    }

    fn agent(&self, host: &RackHost) -> Result<&Agent> {
        let agent = self.agents.iter().find(|agent| agent.host_name() == host.name);
        agent.ok_or_else(|| LabError::Missing { what: format!("the agent of {}", host.name) })
    }

    /// Moves all VMs from some hosts to others, one host after the other.
    fn empty(&self, from: &[&RackHost], to: &[&RackHost], share: Share) -> Result<Left> {
        for guest in &self.guests {
            for host in to {
                guest.expect_on(&host.host)?;
            }
            guest.forget_gap();
        }
        let (began, before) = (Instant::now(), self.racks.crossed()?);
        for host in from {
            self.evacuate(host, to, share)?;
        }
        let (ended, crossed) = (Instant::now(), self.racks.crossed()? - before);
        let mut longest_silence = Duration::ZERO;
        for guest in &self.guests {
            guest.wait_beat(HEARD_MAX)?;
            longest_silence = longest_silence.max(guest.felt(began, ended).gap);
        }
        Ok(Left { took: ended - began, crossed, longest_silence })
    }

    fn evacuate(&self, host: &RackHost, to: &[&RackHost], share: Share) -> Result<()> {
        let names: Vec<&str> = to.iter().map(|host| host.name.as_str()).collect();
        if let Some(sharing) = sharing("evacuate", share)? {
            let to = ["evacuate", &host.name, "--to", &names.join(",")].map(str::to_owned);
            return self.show(host, &[[to.to_vec(), sharing].concat()]);
        }
        let sharing = sharing("migrate", share)?.unwrap_or_default();
        let vms = vms(self.agent(host)?, host)?;
        let migrate = |(vm, to): (String, &&str)| {
            [vec!["migrate".to_owned(), vm, (*to).to_owned()], sharing.clone()].concat()
        };
        let moves: Vec<_> = vms.into_iter().zip(names.iter().cycle()).map(migrate).collect();
        self.show(host, &moves)
    }

    /// Runs commands at the same time. One by itself shows its own progress; several would
    /// overwrite each other's, so the bytes on the links are shown instead.
    fn show(&self, host: &RackHost, commands: &[Vec<String>]) -> Result<()> {
        let agent = self.agent(host)?;
        let alone = commands.len() == 1;
        let mut running = Vec::new();
        println!();
        for words in commands {
            println!("{}$ droveway {}", host.name, words.join(" "));
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            let mut command = agent.command(&host.host, &words);
            if !alone {
                command.stdout(Stdio::piped()).stderr(Stdio::null());
            }
            running.push(command.spawn().doing("run droveway")?);
        }
        let ended = if alone { wait(running) } else { self.wait_showing(running) }?;
        for (said, good) in ended {
            print!("{said}");
            if !good {
                let reason = format!("a VM stayed at {}: {}", host.name, agent.log_text());
                return Err(LabError::Migration { contender: "droveway".to_owned(), reason });
            }
        }
        Ok(())
    }

    fn wait_showing(&self, running: Vec<Child>) -> Result<Vec<(String, bool)>> {
        let (began, before) = (Instant::now(), self.racks.crossed()?);
        let (done, over) = mpsc::channel::<()>();
        thread::scope(|scope| {
            let show = move || {
                while over.recv_timeout(SHOW_EVERY) == Err(RecvTimeoutError::Timeout) {
                    let Ok(now) = self.racks.crossed() else { return };
                    let megabytes = (now - before).bytes() as f64 / 1e6;
                    let seconds = began.elapsed().as_secs_f64();
                    let line = format!("  {seconds:4.1} s  {megabytes:6.1} MB between the racks");
                    tell(&line);
                }
            };
            let shown = thread::Builder::new().name("show".to_owned()).spawn_scoped(scope, show);
            let ended = wait(running);
            drop(done);
            shown.doing("start a thread")?;
            ended
        })
    }

    /// Pages that the guests checked, and wrong ones of them.
    fn check(&self) -> Result<(u64, u64)> {
        let checked = self.guests.iter().map(Guest::check);
        checked.into_iter().try_fold((0, 0), |(pages, wrong), checked| {
            let checked = checked?;
            Ok((pages + checked.pages, wrong + checked.wrong))
        })
    }
}

/// The widest sharing that `droveway migrate` can do.
fn widest() -> Result<Share> {
    for share in [Share::Rack, Share::Host] {
        if sharing("migrate", share)?.is_some() {
            return Ok(share);
        }
    }
    Ok(Share::Off)
}

/// Prints a line of progress; on a terminal it overwrites the one before.
fn tell(line: &str) {
    let mut output = std::io::stderr().lock();
    let end = if output.is_terminal() { "\r" } else { "\n" };
    // Errors don't matter: the line is only for display.
    let _ = write!(output, "{line}{end}").and_then(|()| output.flush());
}

/// Output of each command, and whether the command succeeded.
fn wait(running: Vec<Child>) -> Result<Vec<(String, bool)>> {
    let end = |child: Child| {
        let output = child.wait_with_output().doing("run droveway")?;
        Ok((String::from_utf8_lossy(&output.stdout).into_owned(), output.status.success()))
    };
    running.into_iter().map(end).collect()
}

/// The VMs of a host.
fn vms(agent: &Agent, host: &RackHost) -> Result<Vec<String>> {
    let text = program::output(&mut agent.command(&host.host, &["list", "--json"]))?;
    let unclear = || LabError::Text { what: "droveway's list", text: text.clone() };
    let vms: Vec<serde_json::Value> = serde_json::from_str(&text).map_err(|_| unclear())?;
    let name = |vm: &serde_json::Value| vm["name"].as_str().map(str::to_owned);
    vms.iter().map(name).collect::<Option<_>>().ok_or_else(unclear)
}
