//! Agents as processes, and the command as typed.

use std::fs;
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

use test_scope::TestDir;

const DROVEWAY: &str = env!("CARGO_BIN_EXE_droveway");
const READY_MAX: Duration = Duration::from_secs(30);

/// The QEMU to test with.
pub(crate) fn qemu() -> String {
    std::env::var("DROVEWAY_QEMU").unwrap_or_else(|_| "qemu-system-x86_64".to_owned())
}

/// Hosts on loopback, each with an agent and a directory of its own.
pub(crate) struct Hosts {
    pub(crate) hosts: Vec<Host>,
    pub(crate) dir: TestDir,
}

pub(crate) struct Host {
    pub(crate) name: String,
    dir: PathBuf,
    listen: String,
    /// The agent's file, instead of flags.
    config: Option<PathBuf>,
    /// Additional arguments for its agent.
    pub(crate) more: Vec<String>,
    agent: Option<Child>,
}

impl Hosts {
    pub(crate) fn new<const N: usize>(names: [&str; N]) -> Self {
        let dir = TestDir::new();
        // Held until all are chosen, so that no two are the same.
        let ports: Vec<TcpListener> = names.iter().map(|_| port()).collect();
        let mut peers = String::new();
        let mut hosts = Vec::new();
        for (name, port) in names.iter().zip(&ports) {
            let listen = port.local_addr().unwrap().to_string();
            peers.push_str(&format!("[[host]]\nname = \"{name}\"\naddress = \"{listen}\"\n"));
            let dir = dir.path().join(name);
            fs::create_dir(&dir).unwrap();
            let (name, more) = ((*name).to_owned(), Vec::new());
            hosts.push(Host { name, dir, listen, config: None, more, agent: None });
        }
        fs::write(dir.path().join("peers.toml"), peers).unwrap();
        drop(ports);
        for host in &mut hosts {
            host.start();
        }
        Self { hosts, dir }
    }
}

/// A port that is free and stays so during a restart of an agent: below the ephemeral ports,
/// never given twice in a process, and different in the next process.
pub(crate) fn port() -> TcpListener {
    static TAKEN: AtomicU32 = AtomicU32::new(0);
    let first = 18_000 + std::process::id() % 280 * 50;
    let next = || format!("127.0.0.1:{}", first + TAKEN.fetch_add(1, Relaxed));
    let free = (0..1000).find_map(|_| TcpListener::bind(next()).ok());
    free.expect("some port is free")
}

impl Host {
    /// A host whose agent uses a configuration file; its log and state go into `dir`.
    pub(crate) fn configured(name: &str, dir: PathBuf, config: PathBuf) -> Self {
        let (name, listen, config) = (name.to_owned(), String::new(), Some(config));
        Self { name, dir, listen, config, more: Vec::new(), agent: None }
    }

    /// Starts the agent and waits until it answers.
    pub(crate) fn start(&mut self) {
        self.start_by(&[]);
    }

    /// Starts the agent through a program that then executes it.
    pub(crate) fn start_by(&mut self, by: &[&str]) {
        self.spawn(by);
        let deadline = Instant::now() + READY_MAX;
        while !self.answers() {
            assert!(Instant::now() < deadline, "{}", fs::read_to_string(self.log()).unwrap());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Starts the agent with this limit of open files, soft and hard, and returns whether it
    /// answers.
    ///
    /// If it does not end but can't accept connections, it is killed.
    pub(crate) fn start_with_files(&mut self, files: &str) -> bool {
        self.spawn(&["prlimit", &format!("--nofile={files}")]);
        let deadline = Instant::now() + READY_MAX;
        while self.agent.as_mut().unwrap().try_wait().unwrap().is_none() {
            let mut list = Command::new("timeout");
            list.args(["5", DROVEWAY, "list"]).env("DROVEWAY_API", self.socket());
            match list.output().unwrap().status.code() {
                Some(0) => return true,
                // The agent accepts no connection, and will not recover.
                Some(124) => {
                    self.end("KILL");
                    return false;
                }
                _ => {}
            }
            assert!(Instant::now() < deadline, "{}", fs::read_to_string(self.log()).unwrap());
            std::thread::sleep(Duration::from_millis(20));
        }
        self.agent = None;
        false
    }

    fn answers(&self) -> bool {
        // A command takes more CPU time than to see whether anything listens.
        UnixStream::connect(self.socket()).is_ok() && self.lists()
    }

    fn lists(&self) -> bool {
        self.command(&["list"]).output().unwrap().status.success()
    }

    /// Starts the agent, through the program `by` if there is one.
    fn spawn(&mut self, by: &[&str]) {
        let log = fs::File::options().create(true).append(true).open(self.log()).unwrap();
        let words = [by, &[DROVEWAY]].concat();
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).arg("agent");
        if let Some(config) = &self.config {
            command.arg("--config").arg(config);
        } else {
            let peers = self.dir.parent().unwrap().join("peers.toml");
            command.args(["--name", &self.name, "--listen", &self.listen, "--peers"]).arg(peers);
        }
        if qemu().contains('/') {
            // Other hosts may start the tests' QEMU here too.
            command.args(["--qemu-programs", &qemu()]);
        }
        let child = command
            .arg("--state")
            .arg(self.dir.join("state"))
            .arg("--api")
            .arg(self.socket())
            .args(&self.more)
            .stderr(log)
            .spawn()
            .unwrap();
        self.agent = Some(child);
    }

    pub(crate) fn pid(&self) -> u32 {
        self.agent.as_ref().unwrap().id()
    }

    /// Ends the agent with a signal, and waits until it has ended.
    pub(crate) fn end(&mut self, signal: &str) {
        let mut agent = self.agent.take().unwrap();
        kill(signal, agent.id());
        agent.wait().unwrap();
    }

    /// The address at which other agents reach it.
    pub(crate) fn listen(&self) -> String {
        self.listen.clone()
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.join("api.sock")
    }

    pub(crate) fn state(&self) -> PathBuf {
        self.dir.join("state")
    }

    pub(crate) fn log(&self) -> PathBuf {
        self.dir.join("agent.log")
    }

    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(DROVEWAY);
        command.env("DROVEWAY_API", self.socket()).args(args).stdin(Stdio::null());
        // Nothing is lost of VMs without guests, whichever QEMU they have.
        if matches!(args, ["migrate" | "gang" | "evacuate", ..]) && !args.contains(&"--resume") {
            command.arg("--accept-lost-writes");
        }
        command
    }

    /// The output of a command, which must succeed.
    pub(crate) fn says(&self, args: &[&str]) -> String {
        let output = self.command(args).output().unwrap();
        assert!(
            output.status.success(),
            "{args:?}: {}\n{}",
            text(&output.stderr),
            fs::read_to_string(self.log()).unwrap_or_default()
        );
        text(&output.stdout)
    }

    /// The error of a command, which must fail with exit code 1.
    pub(crate) fn refuses(&self, args: &[&str]) -> String {
        let output = self.command(args).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{args:?}: {output:?}");
        let error = text(&output.stderr);
        assert!(error.contains("droveway: "), "{args:?}: {error}");
        error
    }

    /// Starts a VM with QEMU's firmware, which writes a little to memory, and no guest.
    pub(crate) fn run(&self, name: &str, extra: &str) -> u32 {
        self.run_with(&[], name, extra)
    }

    /// Starts a VM that does nothing, for tests in which none arrives anywhere.
    pub(crate) fn run_halted(&self, name: &str, extra: &str) -> u32 {
        let firmware = test_scope::firmware(Path::new(env!("CARGO_TARGET_TMPDIR")));
        self.run_with(&["-bios", firmware.to_str().unwrap()], name, extra)
    }

    fn run_with(&self, first: &[&str], name: &str, extra: &str) -> u32 {
        let qemu = qemu();
        let mut args = vec!["run", name, "--", &qemu];
        args.extend(first);
        args.extend("-machine q35,accel=tcg -nodefaults -display none -vga std".split(' '));
        args.extend(extra.split_whitespace());
        self.says(&args);
        self.vm(name).unwrap().pid
    }

    pub(crate) fn vms(&self) -> Vec<api::VmSummary> {
        serde_json::from_str(&self.says(&["list", "--json"])).unwrap()
    }

    pub(crate) fn vm(&self, name: &str) -> Option<api::VmSummary> {
        self.vms().into_iter().find(|vm| vm.name == name)
    }

    /// Asserts that nothing of any VM is left on disk.
    ///
    /// A destination may need a moment for its cleanup after the source has ended.
    pub(crate) fn assert_clean(&self) {
        let deadline = Instant::now() + READY_MAX;
        while !self.vms().is_empty() {
            assert!(Instant::now() < deadline, "{:?}", self.vms());
            std::thread::sleep(Duration::from_millis(20));
        }
        for dir in ["vms", "run"] {
            let left: Vec<_> = fs::read_dir(self.state().join(dir)).unwrap().collect();
            assert!(left.is_empty(), "{}: {left:?}", self.name);
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if self.agent.is_none() {
            return;
        }
        if let Ok(output) = self.command(&["list", "--json"]).output() {
            let vms: Vec<api::VmSummary> =
                serde_json::from_slice(&output.stdout).unwrap_or_default();
            for vm in vms {
                let _ = self.command(&["stop", "--force", &vm.name]).output();
            }
        }
        self.end("TERM");
    }
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

pub(crate) fn kill(signal: &str, pid: u32) {
    let done = Command::new("kill").args(["-s", signal, &pid.to_string()]).status().unwrap();
    assert!(done.success());
}

pub(crate) fn is_alive(pid: u32) -> bool {
    // A zombie has no command line.
    fs::read(Path::new("/proc").join(pid.to_string()).join("cmdline"))
        .is_ok_and(|line| !line.is_empty())
}
