//! QEMU's own migration.

use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ::qemu::qmp::{Event, Qmp};
use crossbeam_channel::{Receiver, RecvTimeoutError};
use serde_json::{Value, json};

use super::{Contender, Ground, Moved};
use crate::error::{LabError, Result, SystemContext};
use crate::guest::{Guest, GuestSpec};
use crate::hosts::{Host, RUN_DIR};

const PORT: u16 = 7810;
/// "Huge": QEMU's own limit would be 128 MiB/s.
const BANDWIDTH: u64 = 100 << 30;
const CONNECT: Duration = Duration::from_secs(20);

/// A setting of QEMU's migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// One stream.
    Precopy,
    /// Four channels.
    Multifd,
    /// Four channels, each compressed by zstd.
    Zstd,
    /// One stream, and a guest that is slowed until it converges.
    AutoConverge,
}

impl Mode {
    fn capabilities(self) -> &'static [&'static str] {
        match self {
            Self::Precopy => &[],
            Self::Multifd | Self::Zstd => &["multifd"],
            Self::AutoConverge => &["auto-converge"],
        }
    }

    fn parameters(self, goal: Duration) -> Value {
        let mut parameters = json!({
            "max-bandwidth": BANDWIDTH,
            "downtime-limit": u64::try_from(goal.as_millis()).unwrap_or(300),
        });
        if matches!(self, Self::Multifd | Self::Zstd) {
            parameters["multifd-channels"] = 4.into();
        }
        if self == Self::Zstd {
            parameters["multifd-compression"] = "zstd".into();
            parameters["multifd-zstd-level"] = 1.into();
        }
        parameters
    }
}

/// QEMU on both hosts, and its migration over TCP between them.
pub struct Qemu {
    mode: Mode,
    spec: Option<GuestSpec>,
    ends: Vec<End>,
}

struct End {
    child: Child,
    qmp: Arc<Qmp>,
}

impl Qemu {
    /// With this setting.
    #[must_use]
    pub fn new(mode: Mode) -> Self {
        Self { mode, spec: None, ends: Vec::new() }
    }

    fn launch(
        &self,
        ground: &Ground<'_>,
        host: &Host,
        spec: &GuestSpec,
        more: &[&str],
    ) -> Result<End> {
        let socket = format!("{}.qmp", spec.name);
        let argv = spec.argv(ground.kit, &ground.kit.qemu);
        let mut command = host.command(&argv[0]);
        command
            .args(&argv[1..])
            .args(["-qmp", &format!("unix:{RUN_DIR}/{socket},server=on,wait=off")]);
        let child = command
            .args(more)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .doing("start QEMU")?;
        let qmp = connect(&host.run_dir.join(socket))?;
        let end = End { child, qmp };
        end.tell("migrate-set-parameters", self.mode.parameters(ground.downtime_goal))?;
        let capability = |name: &&str| json!({ "capability": name, "state": true });
        let on: Vec<_> =
            self.mode.capabilities().iter().chain(&["events"]).map(capability).collect();
        end.tell("migrate-set-capabilities", json!({ "capabilities": on }))?;
        Ok(end)
    }

    fn failed(&self, reason: impl Into<String>) -> LabError {
        LabError::Migration { contender: self.name(), reason: reason.into() }
    }
}

fn connect(socket: &Path) -> Result<Arc<Qmp>> {
    let until = Instant::now() + CONNECT;
    loop {
        match Qmp::connect(socket, CONNECT) {
            Ok(qmp) => return Ok(qmp),
            Err(error) if Instant::now() > until => {
                return Err(LabError::Qmp { command: "hello".into(), answer: error.to_string() });
            }
            // QEMU has not made its socket yet.
            Err(_) => std::thread::sleep(Duration::from_millis(10)),
        }
    }
}

impl End {
    fn tell(&self, command: &str, arguments: Value) -> Result<Value> {
        self.qmp.execute(command, arguments).map_err(|error| LabError::Qmp {
            command: command.to_owned(),
            answer: error.to_string(),
        })
    }
}

impl Contender for Qemu {
    fn name(&self) -> String {
        match self.mode {
            Mode::Precopy => "qemu-precopy",
            Mode::Multifd => "qemu-multifd",
            Mode::Zstd => "qemu-zstd",
            Mode::AutoConverge => "qemu-autoconverge",
        }
        .to_owned()
    }

    fn start(&mut self, ground: &Ground<'_>, spec: &GuestSpec) -> Result<Guest> {
        let end = self.launch(ground, &ground.hosts.a, spec, &[])?;
        self.ends.push(end);
        self.spec = Some(spec.clone());
        Guest::meet(spec.clone(), &ground.hosts.a)
    }

    fn migrate(&mut self, ground: &Ground<'_>) -> Result<Moved> {
        let started = Instant::now();
        let spec = self.spec.clone().ok_or_else(|| self.failed("no guest"))?;
        let there = self.launch(ground, &ground.hosts.b, &spec, &["-incoming", "defer"])?;
        let uri = format!("tcp:{}:{PORT}", ground.hosts.b.addresses[0]);
        there.tell("migrate-incoming", json!({ "uri": uri }))?;
        let arriving = there.qmp.events();
        self.ends.push(there);
        let here = &self.ends[0];
        let leaving = here.qmp.events();
        let began = Instant::now();
        here.tell("migrate", json!({ "uri": uri }))?;
        let until = began + ground.timeout;
        let failed = |error| {
            self.failed(match error {
                RecvTimeoutError::Timeout => {
                    format!("not done after {} s", ground.timeout.as_secs())
                }
                RecvTimeoutError::Disconnected => "its QEMU ended".to_owned(),
            })
        };
        let ran = wait(&arriving, until, "RESUME").map_err(failed)?;
        let stopped = wait(&leaving, until, "STOP").map_err(failed)?;
        Ok(Moved {
            began,
            ran: ran.at,
            prepare: began - started,
            downtime: ran.at.saturating_duration_since(stopped.at),
        })
    }

    fn stop(&mut self) {
        for mut end in self.ends.drain(..) {
            let _ = end.child.kill();
            let _ = end.child.wait();
        }
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        self.stop();
    }
}

fn wait(
    events: &Receiver<Event>,
    until: Instant,
    name: &str,
) -> std::result::Result<Event, RecvTimeoutError> {
    loop {
        let event = events.recv_deadline(until)?;
        if event.name == name {
            return Ok(event);
        }
    }
}
