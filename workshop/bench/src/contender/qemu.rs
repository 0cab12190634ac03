//! QEMU's own migration, with its own way to move a disk with the VM.

mod copy;
mod relay;

use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ::qemu::qmp::{Event, Qmp};
use crossbeam_channel::{Receiver, RecvTimeoutError};
use serde_json::{Value, json};

use self::relay::Relays;
use super::{Contender, Ground, Moved, tls};
use crate::relay::{CHANNELS, RELAY, socket};
use lab::error::{LabError, Result, SystemContext};
use lab::guest::{Guest, GuestSpec};
use lab::hosts::{Host, RUN_DIR};

const PORT: u16 = 7810;
/// No limit in effect: QEMU's default is 128 MiB/s.
const BANDWIDTH: u64 = 100 << 30;
/// Room for all of a guest's RAM; a power of two.
const XBZRLE_CACHE_BYTES: u64 = 512 << 20;
/// The longest that QEMU accepts.
const DOWNTIME_LIMIT_MAX_MS: u64 = 2_000_000;
const CONNECT: Duration = Duration::from_secs(20);

/// A mode of QEMU's migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// One stream.
    Precopy,
    /// Four channels.
    Multifd,
    /// Four channels through programs that only relay them.
    Relay,
    /// One stream, over TLS with certificates of both ends.
    PrecopyTls,
    /// Four channels, each over TLS with certificates of both ends.
    MultifdTls,
    /// Four channels, each compressed by zstd.
    Zstd,
    /// Four channels, limited by an operator who knows the spare capacity of the link.
    Limited {
        /// Limit, in bytes of content.
        bytes_per_s: u64,
    },
    /// One stream; after `seconds` the VM is stopped, however much is left. It has the name of
    /// [`Mode::Precopy`].
    PrecopyUntil {
        /// Counted from the command.
        seconds: u32,
    },
    /// One stream, with the guest throttled until the migration converges.
    AutoConverge,
    /// One stream, in which a page that is sent again goes as a delta to its earlier content, if
    /// that is in a cache, which has room for all of the guest's RAM.
    Xbzrle,
    /// The disk by a mirror to an NBD export, then one stream.
    MirrorPrecopy,
    /// The disk by a mirror to an NBD export, then one stream, with the guest throttled until the
    /// migration converges.
    MirrorAutoConverge,
    /// The disk by a mirror to an NBD export, then four channels.
    Mirror,
    /// The disk by a mirror to an NBD export, then four channels, each compressed by zstd. NBD has
    /// no compression.
    MirrorZstd,
}

impl Mode {
    fn capabilities(self) -> &'static [&'static str] {
        match self {
            Self::Precopy | Self::PrecopyUntil { .. } | Self::PrecopyTls => &[],
            Self::Multifd | Self::Relay | Self::Limited { .. } | Self::Zstd | Self::MultifdTls => {
                &["multifd"]
            }
            Self::AutoConverge => &["auto-converge"],
            Self::Xbzrle => &["xbzrle"],
            Self::MirrorPrecopy => &["pause-before-switchover"],
            Self::MirrorAutoConverge => &["auto-converge", "pause-before-switchover"],
            Self::Mirror | Self::MirrorZstd => &["multifd", "pause-before-switchover"],
        }
    }

    /// Name in tables.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Precopy | Self::PrecopyUntil { .. } => "qemu-precopy",
            Self::Multifd => "qemu-multifd",
            Self::Relay => RELAY,
            Self::PrecopyTls => "qemu-tls",
            Self::MultifdTls => "qemu-multifd-tls",
            Self::Limited { .. } => "qemu-limited",
            Self::Zstd => "qemu-zstd",
            Self::AutoConverge => "qemu-autoconverge",
            Self::Xbzrle => "qemu-xbzrle",
            Self::MirrorPrecopy => "qemu-mirror-precopy",
            Self::MirrorAutoConverge => "qemu-mirror-autoconverge",
            Self::Mirror => "qemu-mirror",
            Self::MirrorZstd => "qemu-mirror-zstd",
        }
    }

    fn moves_disk(self) -> bool {
        matches!(
            self,
            Self::MirrorPrecopy | Self::MirrorAutoConverge | Self::Mirror | Self::MirrorZstd
        )
    }

    pub(super) fn is_encrypted(self) -> bool {
        matches!(self, Self::PrecopyTls | Self::MultifdTls)
    }

    fn parameters(self, goal: Duration) -> Value {
        let mut parameters = json!({
            "max-bandwidth": BANDWIDTH,
            "downtime-limit": u64::try_from(goal.as_millis()).unwrap_or(300),
        });
        if let Self::Limited { bytes_per_s } = self {
            parameters["max-bandwidth"] = bytes_per_s.into();
        }
        if self.capabilities().contains(&"multifd") {
            parameters["multifd-channels"] = CHANNELS.into();
        }
        if self == Self::Xbzrle {
            parameters["xbzrle-cache-size"] = XBZRLE_CACHE_BYTES.into();
        }
        if self.is_encrypted() {
            parameters["tls-creds"] = tls::CREDENTIALS.into();
        }
        if matches!(self, Self::Zstd | Self::MirrorZstd) {
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
    /// For [`Mode::Relay`].
    relays: Option<Relays>,
}

/// One QEMU, at either end.
pub(super) struct End {
    child: Child,
    pub(super) qmp: Arc<Qmp>,
}

impl Qemu {
    /// A contender with this mode.
    #[must_use]
    pub fn new(mode: Mode) -> Self {
        Self { mode, spec: None, ends: Vec::new(), relays: None }
    }

    fn launch(
        &self,
        ground: &Ground<'_>,
        host: &Host,
        spec: &GuestSpec,
        more: &[String],
    ) -> Result<End> {
        let more: Vec<&str> = more.iter().map(String::as_str).collect();
        let argv = spec.argv(ground.kit, &ground.kit.qemu);
        launch(self.mode, ground.downtime_goal, host, &spec.name, &argv, &more)
    }

    fn failed(&self, reason: impl Into<String>) -> LabError {
        LabError::Migration { contender: self.name(), reason: reason.into() }
    }

    fn explain(&self, failure: Failure, ground: &Ground<'_>) -> LabError {
        match failure {
            Failure::Late => LabError::Late { contender: self.name(), waited: ground.timeout },
            Failure::Other(reason) => self.failed(reason),
        }
    }

    /// Waits until the source's VM stops; [`Mode::PrecopyUntil`] forces that.
    fn wait_stop(
        &self,
        here: &End,
        leaving: &Events,
        began: Instant,
    ) -> std::result::Result<Event, Failure> {
        let is_stop = |event: &Event| event.name == "STOP";
        if let Mode::PrecopyUntil { seconds } = self.mode {
            let until = began + Duration::from_secs(seconds.into());
            match leaving.wait_until(until.min(leaving.until), is_stop) {
                Err(Failure::Late) => {}
                heard => return heard,
            }
            let any = json!({ "downtime-limit": DOWNTIME_LIMIT_MAX_MS });
            let told = here.tell("migrate-set-parameters", any);
            told.map_err(|error| Failure::Other(error.to_string()))?;
        }
        leaving.wait(is_stop)
    }
}

/// Starts a QEMU set up for migration in this mode.
pub(super) fn launch(
    mode: Mode,
    goal: Duration,
    host: &Host,
    name: &str,
    argv: &[String],
    more: &[&str],
) -> Result<End> {
    let end = begin(host, name, argv, more)?;
    end.prepare(mode, goal)?;
    Ok(end)
}

/// Starts a QEMU.
fn begin(host: &Host, name: &str, argv: &[String], more: &[&str]) -> Result<End> {
    let socket = format!("{name}.qmp");
    let mut command = host.command(&argv[0]);
    command.args(&argv[1..]).args(["-qmp", &format!("unix:{RUN_DIR}/{socket},server=on,wait=off")]);
    let child = command
        .args(more)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .doing("start QEMU")?;
    let qmp = connect(&host.run_dir.join(socket))?;
    Ok(End { child, qmp })
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
    /// Sets it up for migration in this mode.
    fn prepare(&self, mode: Mode, goal: Duration) -> Result<()> {
        self.tell("migrate-set-parameters", mode.parameters(goal))?;
        let capability = |name: &&str| json!({ "capability": name, "state": true });
        let on: Vec<_> = mode.capabilities().iter().chain(&["events"]).map(capability).collect();
        self.tell("migrate-set-capabilities", json!({ "capabilities": on })).map(drop)
    }

    pub(super) fn tell(&self, command: &str, arguments: Value) -> Result<Value> {
        self.qmp.execute(command, arguments).map_err(|error| LabError::Qmp {
            command: command.to_owned(),
            answer: error.to_string(),
        })
    }

    pub(super) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Contender for Qemu {
    fn name(&self) -> String {
        self.mode.name().to_owned()
    }

    fn start(&mut self, ground: &Ground<'_>, spec: &GuestSpec) -> Result<Guest> {
        let tls = self.mode.is_encrypted().then(|| tls::give(ground.hosts)).transpose()?;
        let mut more = if tls.is_some() { tls::arguments("client") } else { Vec::new() };
        more.extend(ground.from.iter().flat_map(|from| ["-incoming", *from].map(str::to_owned)));
        let more: Vec<&str> = more.iter().map(String::as_str).collect();
        let argv = spec.argv(ground.kit, &ground.kit.qemu);
        let end = begin(&ground.hosts.a, &spec.name, &argv, &more)?;
        let qmp = Arc::clone(&end.qmp);
        self.ends.push(end);
        self.spec = Some(spec.clone());
        let guest = ground.meet(spec, || Ok(qmp))?;
        // Not before it has continued from a snapshot, whose stream has no channels.
        if let Some(end) = self.ends.last() {
            end.prepare(self.mode, ground.downtime_goal)?;
            if tls.is_some() {
                end.tell("migrate-set-parameters", json!({ "tls-hostname": tls::DESTINATION }))?;
            }
        }
        Ok(guest)
    }

    fn migrate(&mut self, ground: &Ground<'_>) -> Result<Moved> {
        let started = Instant::now();
        let spec = self.spec.clone().ok_or_else(|| self.failed("no guest"))?;
        if self.mode.moves_disk() {
            copy::make_room(ground.hosts)?;
        }
        let mut more = ["-incoming", "defer"].map(str::to_owned).to_vec();
        if self.mode.is_encrypted() {
            more.extend(tls::arguments("server"));
        }
        let there = self.launch(ground, &ground.hosts.b, &spec, &more)?;
        let address = ground.hosts.b.addresses[0];
        if self.mode.moves_disk() {
            copy::export(&there, address)?;
        }
        let uri = match self.mode {
            Mode::Relay => format!("unix:{}", socket().display()),
            _ => format!("tcp:{address}:{PORT}"),
        };
        there.tell("migrate-incoming", json!({ "uri": uri }))?;
        if self.mode == Mode::Relay {
            self.relays = Some(Relays::start(ground.hosts, &there)?);
        }
        let arriving = there.qmp.events();
        self.ends.push(there);
        let [here, there] = self.ends.as_slice() else { return Err(self.failed("no guest")) };
        let leaving = Events { events: here.qmp.events(), until: started + ground.timeout };
        let arriving = Events { events: arriving, until: leaving.until };
        let began = Instant::now();
        if self.mode.moves_disk() {
            copy::begin(here, address)?;
            copy::wait_ready(&leaving).map_err(|failure| self.explain(failure, ground))?;
        }
        here.tell("migrate", json!({ "uri": uri }))?;
        let stopped = self.wait_stop(here, &leaving, began);
        let stopped = stopped.map_err(|failure| self.explain(failure, ground))?;
        if self.mode.moves_disk() {
            let finished = copy::finish(here, there, &leaving);
            finished.map_err(|failure| self.explain(failure, ground))?;
        }
        let ran = arriving.wait(|event| event.name == "RESUME");
        let ran = ran.map_err(|failure| self.explain(failure, ground))?;
        let passes = here.tell("query-migrate", json!({}))?["ram"]["dirty-sync-count"].as_u64();
        Ok(Moved {
            began,
            ran: ran.at,
            prepare: began - started,
            downtime: ran.at.saturating_duration_since(stopped.at),
            passes,
        })
    }

    fn stop(&mut self) {
        self.relays = None;
        for mut end in self.ends.drain(..) {
            end.kill();
        }
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Events of one QEMU, and how long to wait for them.
pub(super) struct Events {
    pub(super) events: Receiver<Event>,
    pub(super) until: Instant,
}

/// Why a wait failed.
pub(super) enum Failure {
    Late,
    Other(String),
}

impl Events {
    /// The next event that is the right one, or why there is none.
    pub(super) fn wait(
        &self,
        is_right: impl Fn(&Event) -> bool,
    ) -> std::result::Result<Event, Failure> {
        self.wait_until(self.until, is_right)
    }

    fn wait_until(
        &self,
        until: Instant,
        is_right: impl Fn(&Event) -> bool,
    ) -> std::result::Result<Event, Failure> {
        loop {
            match self.events.recv_deadline(until) {
                Ok(event) if is_right(&event) => return Ok(event),
                Ok(_) => {}
                Err(RecvTimeoutError::Timeout) => return Err(Failure::Late),
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Failure::Other("its QEMU ended".to_owned()));
                }
            }
        }
    }
}
