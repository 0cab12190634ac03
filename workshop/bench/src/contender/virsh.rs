//! libvirt's own migration by `virsh migrate`, unaided or carried by agents.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::Value;

use super::droveway::certify;
use super::{Contender, Ground, Moved, tls};
use lab::agent::Agent;
use lab::error::{LabError, Result};
use lab::guest::{Guest, GuestSpec};
use lab::libvirt::{Disk, Domain, Libvirtd, Migration, carrying_agent, leading_to_agents};
use lab::setup::{self, Qemu, Version};

use crate::image;

/// Number of connections that `--parallel` makes.
const CONNECTIONS: u8 = 4;
/// Time that libvirt takes before and after QEMU's migration: under TCG it probes the capabilities
/// of each QEMU that it starts.
const AROUND: Duration = Duration::from_secs(30);
/// The first libvirt that can have QEMU compress by zstd.
const COMPRESSES: Version = Version { major: 9, minor: 4, patch: 0 };
/// Longest time until a moved guest reports again.
const HEARD_MAX: Duration = Duration::from_secs(20);

/// A way to migrate with libvirt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way {
    /// `--parallel`.
    pub parallel: bool,
    /// Agents carry the streams.
    pub carried: bool,
    /// Over libvirt's own TLS, or the agents'.
    pub encrypted: bool,
    /// QEMU compresses, which needs `--parallel`.
    pub compressed: bool,
}

impl Way {
    const USUAL: Self =
        Self { parallel: false, carried: false, encrypted: false, compressed: false };

    /// All ways without compression that encrypt, or all that don't.
    #[must_use]
    pub fn all(encrypted: bool) -> Vec<Self> {
        let of = |(parallel, carried)| Self { parallel, carried, encrypted, ..Self::USUAL };
        [(false, false), (true, false), (false, true), (true, true)].map(of).into()
    }

    /// The way in which QEMU compresses.
    pub const COMPRESSED: Self = Self { parallel: true, compressed: true, ..Self::USUAL };
}

/// Whether this libvirt can have QEMU compress by zstd.
#[must_use]
pub fn can_compress() -> bool {
    let made_of = setup::ensure().and_then(|kit| setup::libvirt(&kit));
    made_of.is_ok_and(|made_of| made_of.version >= COMPRESSES)
}

/// A libvirtd on each host, and a guest as its domain.
pub struct Virsh {
    way: Way,
    /// A second VM moves at the same time.
    has_twin: bool,
    twin: Option<Guest>,
    name: Option<String>,
    agents: Vec<Agent>,
    daemons: Vec<Libvirtd>,
    report: Option<api::Report>,
}

impl Virsh {
    /// A contender that migrates in this way.
    #[must_use]
    pub fn new(way: Way) -> Self {
        Self {
            way,
            has_twin: false,
            twin: None,
            name: None,
            agents: Vec::new(),
            daemons: Vec::new(),
            report: None,
        }
    }

    /// The same with two VMs at a time, which have content of their own and content in common.
    #[must_use]
    pub fn of_twins(way: Way) -> Self {
        Self { has_twin: true, ..Self::new(way) }
    }

    /// Checks that the second VM arrived with its memory intact.
    fn check_twin(&self) -> Result<()> {
        let Some(twin) = &self.twin else { return Ok(()) };
        twin.wait_beat(HEARD_MAX)?;
        let checked = twin.check()?;
        if checked.wrong > 0 || checked.pages == 0 {
            return Err(self.failed(format!("the second VM: {checked:?}")));
        }
        Ok(())
    }

    fn failed(&self, reason: impl Into<String>) -> LabError {
        LabError::Migration { contender: self.name(), reason: reason.into() }
    }

    /// The source agent's report of the migration.
    fn ask_agent(&self, ground: &Ground<'_>) -> Option<api::Report> {
        let agent = self.agents.first()?;
        let ask = |args: &[&str]| agent.command(&ground.hosts.a, args).output().ok();
        let listed = ask(&["list", "--migrations", "--json"])?;
        let listed: Vec<api::Progress> = serde_json::from_slice(&listed.stdout).ok()?;
        let report = ask(&["report", &listed.first()?.id, "--json"])?;
        serde_json::from_slice(&report.stdout).ok()
    }
}

impl Contender for Virsh {
    fn name(&self) -> String {
        let by = if self.way.carried { "droveway" } else { "virsh" };
        let stream = if self.way.parallel { "parallel" } else { "classic" };
        let Way { encrypted, compressed, .. } = self.way;
        let tls = if encrypted { "-tls" } else { "" };
        format!("{by}-{stream}{tls}{}", if compressed { "-zstd" } else { "" })
    }

    fn start(&mut self, ground: &Ground<'_>, spec: &GuestSpec) -> Result<Guest> {
        let (kit, hosts) = (ground.kit, ground.hosts);
        let made_of = setup::libvirt(kit)?;
        let Way { carried, encrypted, .. } = self.way;
        let qemus_own = if encrypted && !carried {
            tls::give(hosts)?;
            tls::of_libvirt()
        } else {
            String::new()
        };
        let agents_own = if encrypted && carried { certify(hosts)?.to_vec() } else { Vec::new() };
        let agents_own: Vec<&str> = agents_own.iter().map(String::as_str).collect();
        for host in [&hosts.a, &hosts.b] {
            let lines = if carried { leading_to_agents(hosts, host) } else { qemus_own.clone() };
            self.daemons.push(Libvirtd::start(hosts, host, &made_of, &lines)?);
            if carried {
                self.agents.push(carrying_agent(hosts, host, &agents_own)?);
            }
        }
        let mut domain = Domain::new(spec.clone());
        if let Some(disk) = ground.disk {
            domain.disks = vec![Disk::make(&hosts.b, image::FILE, "raw", disk.bytes)?];
        }
        let qemu = Qemu { program: kit.qemu.clone(), version: kit.qemu_version };
        self.name = Some(spec.name.clone());
        domain.bring(&hosts.b, kit)?;
        let guest = domain.start(&self.daemons[0], &hosts.a, kit, &qemu)?;
        if self.has_twin {
            let mut twin = Domain::new(spec.clone());
            twin.guest.name += "-twin";
            twin.guest.orders.seed += 1;
            twin.bring(&hosts.b, kit)?;
            self.twin = Some(twin.start(&self.daemons[0], &hosts.a, kit, &qemu)?);
        }
        Ok(guest)
    }

    fn migrate(&mut self, ground: &Ground<'_>) -> Result<Moved> {
        let name = self.name.clone().ok_or_else(|| self.failed("no guest"))?;
        let [here, there] = &self.daemons[..] else { return Err(self.failed("no libvirt")) };
        let parallel = self.way.parallel.then_some(CONNECTIONS);
        let copy_storage = ground.disk.is_some();
        let more = match self.way {
            Way { encrypted: true, carried: false, .. } => {
                ["--tls", "--tls-destination", tls::DESTINATION].map(str::to_owned).to_vec()
            }
            Way { compressed: true, .. } => {
                ["--compressed", "--comp-methods", "zstd"].map(str::to_owned).to_vec()
            }
            _ => Vec::new(),
        };
        let how = Migration { parallel, copy_storage, more, ..Migration::default() };
        let asked = Instant::now();
        let mut all = Vec::new();
        if let Some(twin) = &self.twin {
            twin.expect_on(&ground.hosts.b)?;
            all.push(how.begin(&twin.spec.name, here, &ground.hosts.a, there)?);
        }
        all.push(how.begin(&name, here, &ground.hosts.a, there)?);
        for migrating in all {
            let ended = migrating.wait(ground.timeout + AROUND)?;
            if !ended.success {
                return Err(self.failed(ended.said));
            }
        }
        self.report = self.ask_agent(ground);
        self.check_twin()?;
        let [here, there] = &self.daemons[..] else { return Err(self.failed("no libvirt")) };
        let last = |log: &str, what: &dyn Fn(&Event) -> bool| {
            events(log).into_iter().rfind(what).map(|event| event.at)
        };
        let (source, destination) = (here.log_text(), there.log_text());
        // The copy of disks comes first.
        let first = match copy_storage {
            true => ("JOB_STATUS_CHANGE", "created"),
            false => ("MIGRATION", "setup"),
        };
        let mut all = events(&source).into_iter();
        let began = all.find(|event| (event.name.as_str(), event.status.as_str()) == first);
        let began = began.map(|event| event.at);
        let stopped = last(&source, &|event| event.name == "STOP");
        let ran = last(&destination, &|event| event.name == "RESUME");
        let (Some(began), Some(stopped), Some(ran)) = (began, stopped, ran) else {
            return Err(self.failed("libvirt's log does not tell of it"));
        };
        let began = instant(began);
        Ok(Moved {
            began,
            ran: instant(ran),
            prepare: began - asked,
            downtime: ran.saturating_sub(stopped),
            passes: None,
        })
    }

    fn report(&self) -> Option<&api::Report> {
        self.report.as_ref()
    }

    fn stop(&mut self) {
        // Its QEMU ends with its host.
        self.twin = None;
        self.agents.clear();
        self.daemons.clear();
    }
}

/// An event that libvirt received from a QEMU.
struct Event {
    /// Time since 1970, by that QEMU's clock.
    at: Duration,
    name: String,
    /// Status of the migration or of a job.
    status: String,
}

/// The events in a log of libvirt.
fn events(log: &str) -> Vec<Event> {
    let told = log.lines().filter(|line| line.contains("QEMU_MONITOR_RECV_EVENT"));
    told.filter_map(|line| event(line.split_once("event=")?.1)).collect()
}

fn event(json: &str) -> Option<Event> {
    let event: Value = serde_json::from_str(json.trim()).ok()?;
    let time = &event["timestamp"];
    let at = Duration::from_secs(time["seconds"].as_u64()?)
        + Duration::from_micros(time["microseconds"].as_u64()?);
    let status = event["data"]["status"].as_str().unwrap_or_default().to_owned();
    Some(Event { at, name: event["event"].as_str()?.to_owned(), status })
}

/// Converts a past moment to the clock of the other measurements.
fn instant(at: Duration) -> Instant {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let ago = now.saturating_sub(at);
    Instant::now().checked_sub(ago).unwrap_or_else(Instant::now)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn qemu_events_are_found_in_a_log() {
        let log = "2026-11-20 10:00:00.100+0000: 7: info : qemuMonitorJSONIOProcessLine:208 : \
                   QEMU_MONITOR_RECV_EVENT: mon=0x7f event={\"timestamp\": {\"seconds\": 5, \
                   \"microseconds\": 250000}, \"event\": \"MIGRATION\", \"data\": {\"status\": \
                   \"setup\"}}\nnothing\nQEMU_MONITOR_RECV_EVENT: event={";
        let [Event { at, name, status }] = &events(log)[..] else { panic!("not one") };
        assert_eq!(
            (*at, name.as_str(), status.as_str()),
            (Duration::from_millis(5250), "MIGRATION", "setup")
        );
        assert!(events("").is_empty());
    }

    #[test]
    fn each_has_a_name_of_its_own() {
        let name = |way| Virsh::new(way).name();
        let names: Vec<_> = Way::all(false).into_iter().map(name).collect();
        assert_eq!(
            names,
            ["virsh-classic", "virsh-parallel", "droveway-classic", "droveway-parallel"]
        );
        let encrypted: Vec<_> = Way::all(true).into_iter().map(name).collect();
        let with_tls: Vec<_> = names.iter().map(|name| format!("{name}-tls")).collect();
        assert_eq!(encrypted, with_tls);
        assert_eq!(name(Way::COMPRESSED), "virsh-parallel-zstd");
    }
}
