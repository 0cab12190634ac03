//! One emulated host.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::Child;
use std::thread;
use std::time::{Duration, Instant};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::domain::{Beat, DomainSpec, right};
use super::machine::{CONSOLE, PORT, address, agent_command};
use super::{LINKS, NAMES};
use crate::error::{LabError, Result, SystemContext};
use crate::hosts::Host;

/// Longest time until domain 0 answers, also where others have the CPUs.
const UP_MAX: Duration = Duration::from_secs(300);
/// Longest time of a command.
const COMMAND_MAX: Duration = Duration::from_secs(900);
/// Longest time until a guest has reported what is awaited.
const BEAT_MAX: Duration = Duration::from_secs(180);
const PAUSE: Duration = Duration::from_millis(500);
/// What of a console is shown.
const CONSOLE_BYTES: usize = 3000;
/// Longest output that is read.
const OUTPUT_BYTES_MAX: u32 = 16 << 20;
/// The port of a plain transport.
const PLAIN_PORT: u16 = 9000;

/// What a command did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Said {
    /// Its exit code.
    pub status: i32,
    /// Its output, with its errors.
    pub text: String,
}

/// A migration that has ended.
#[derive(Clone, Debug)]
pub struct Migrated {
    /// What `xl migrate` did.
    pub said: Said,
    /// From its start to its end.
    pub took: Duration,
}

/// An emulated host, whose commands run in its domain 0.
#[derive(Debug)]
pub struct XenHost {
    number: usize,
    /// The network namespace of its QEMU, by which the lab reaches it.
    network: File,
    console: PathBuf,
    qemu: Child,
}

impl XenHost {
    /// The host whose QEMU this is.
    pub(super) fn new(host: &Host, number: usize, qemu: Child) -> io::Result<Self> {
        // A thread of its own has that namespace.
        let network = host.within(|| File::open("/proc/thread-self/ns/net"))?;
        Ok(Self { number, network, console: host.run_dir.join(CONSOLE), qemu })
    }

    /// Its name, as in the peers file.
    #[must_use]
    pub fn name(&self) -> &'static str {
        NAMES[self.number]
    }

    /// The end of its console.
    #[must_use]
    pub fn console(&self) -> String {
        let text = fs::read(&self.console).unwrap_or_default();
        String::from_utf8_lossy(&text[text.len().saturating_sub(CONSOLE_BYTES)..]).into_owned()
    }

    pub(super) fn wait_up(&self) -> Result<()> {
        let until = Instant::now() + UP_MAX;
        while self.run("true").is_err() {
            if Instant::now() > until {
                let what = format!("the emulated {}", self.name());
                let detail = format!("; its console: {}", self.console());
                return Err(LabError::Silent { what, waited: UP_MAX, detail });
            }
            thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// Runs a script, whatever its exit code.
    ///
    /// # Errors
    /// If the host does not answer.
    ///
    /// # Panics
    /// If the lab may not enter the host's network.
    pub fn run(&self, script: &str) -> Result<Said> {
        let enter = || {
            move_into_link_name_space(self.network.as_fd(), Some(LinkNameSpaceType::Network))
                .expect("root may enter networks");
            ask(script)
        };
        let said = thread::scope(|scope| scope.spawn(enter).join());
        said.unwrap_or_else(|fault| std::panic::resume_unwind(fault))
            .doing("run a command on an emulated host")
    }

    /// The output of a script, which must succeed.
    ///
    /// # Errors
    /// If it fails.
    pub fn output(&self, script: &str) -> Result<String> {
        let said = self.run(script)?;
        if said.status == 0 {
            return Ok(said.text);
        }
        let command = format!("{}: {script}", self.name());
        let status = format!("exit code {}", said.status);
        Err(LabError::Failed { command, status, stderr: said.text })
    }

    /// Starts the agent, which uses the first of the links.
    ///
    /// # Errors
    /// If it doesn't answer.
    pub fn start_agent(&self, links: usize) -> Result<()> {
        let command = agent_command(self.number, links);
        let script = format!(
            "mkdir -p -m 700 /var/lib/droveway/state\n\
             RUST_BACKTRACE=1 setsid {command} >>/var/log/agent.log 2>&1 </dev/null &\n\
             echo $! >/run/agent.pid\nfor try in $(seq 200); do\n\
             droveway list >/dev/null 2>&1 && exit 0\n\
             kill -0 $(cat /run/agent.pid) 2>/dev/null || break\nsleep 0.3\ndone\n\
             tail -n 20 /var/log/agent.log\nexit 1"
        );
        self.output(&script).map(drop)
    }

    /// Kills the agent, as a crash would.
    ///
    /// # Errors
    /// If the host does not answer.
    pub fn kill_agent(&self) -> Result<()> {
        let script = "kill -9 $(cat /run/agent.pid)\n\
                      while kill -0 $(cat /run/agent.pid) 2>/dev/null; do sleep 0.1; done";
        self.run(script).map(drop)
    }

    /// The end of the agent's log.
    #[must_use]
    pub fn agent_log(&self) -> String {
        let log = self.run("tail -n 60 /var/log/agent.log");
        log.map_or_else(|error| error.to_string(), |said| said.text)
    }

    /// Creates a domain, and waits until its guest has checked its memory once.
    ///
    /// # Errors
    /// If it doesn't come up.
    pub fn create(&self, spec: &DomainSpec) -> Result<()> {
        let (name, file) = (&spec.name, spec.file());
        let script =
            format!("cat >/root/{name}.cfg <<'END'\n{file}END\nxl create -q /root/{name}.cfg");
        self.output(&script)?;
        self.wait_checked(name, 1).map(drop)
    }

    /// Destroys all domains but domain 0.
    ///
    /// # Errors
    /// If that fails.
    pub fn destroy_all(&self) -> Result<()> {
        let script = "for id in $(xl list | awk 'NR > 2 { print $2 }'); do xl destroy $id; done\n\
                      rm -f /var/log/xen/console/guest-*";
        self.output(script).map(drop)
    }

    /// The names of all domains but domain 0, in order.
    ///
    /// # Errors
    /// If xl fails.
    pub fn domains(&self) -> Result<Vec<String>> {
        let listed = self.output("xl list | awk 'NR > 2 { print $1 }' | sort")?;
        Ok(listed.lines().map(str::to_owned).collect())
    }

    /// What a domain has printed on this host.
    fn printed(&self, name: &str) -> Result<String> {
        let consoles = format!("/var/log/xen/console/guest-{name}");
        self.output(&format!("cat {consoles}.log {consoles}--incoming.log 2>/dev/null; true"))
    }

    /// The beats of a domain on this host, in order.
    ///
    /// # Errors
    /// If the host does not answer.
    pub fn beats(&self, name: &str) -> Result<Vec<Beat>> {
        Ok(Beat::all(&self.printed(name)?))
    }

    /// Waits until the guest of a domain has checked all its memory here so often, from now on.
    /// Returns its last beat.
    ///
    /// # Errors
    /// If a page is wrong, or the guest is silent.
    pub fn wait_checked(&self, name: &str, times: u64) -> Result<Beat> {
        let until = Instant::now() + BEAT_MAX;
        let mut first = None;
        loop {
            let printed = self.printed(name)?;
            right(&printed)?;
            if let Some(last) = Beat::all(&printed).last() {
                let from = *first.get_or_insert(last.checks);
                if last.checks >= from + times {
                    return Ok(*last);
                }
            }
            if Instant::now() > until {
                let what = format!("the domain {name} at {}", self.name());
                let detail = format!("; it printed: {printed}");
                return Err(LabError::Silent { what, waited: BEAT_MAX, detail });
            }
            thread::sleep(PAUSE);
        }
    }

    /// Forgets what a domain has printed here.
    ///
    /// # Errors
    /// If the host does not answer.
    pub fn forget(&self, name: &str) -> Result<()> {
        let consoles = format!("/var/log/xen/console/guest-{name}");
        self.output(&format!("rm -f {consoles}.log {consoles}--incoming.log")).map(drop)
    }

    /// Migrates a domain through the agents, with these options of `xl migrate`.
    ///
    /// # Errors
    /// If the host does not answer.
    pub fn migrate(&self, name: &str, to: &Self, options: &str) -> Result<Migrated> {
        let transport = format!("exec droveway xen-send {}", to.name());
        self.migrate_by(name, options, &transport)
    }

    /// Migrates a domain by one plain connection over the first link.
    ///
    /// # Errors
    /// If a host does not answer.
    pub fn migrate_plainly(&self, name: &str, to: &Self) -> Result<Migrated> {
        let target = Self::listen_plainly(to)?;
        self.migrate_by(name, "", &format!("exec xen-kit send {target}"))
    }

    /// The same with these options of `xl migrate`. Returns what xl wrote to its transport, without
    /// the contents of pages, as `seeds::recording` reads it.
    ///
    /// # Errors
    /// As [`XenHost::migrate_plainly`], or if nothing was recorded.
    pub fn migrate_recorded(
        &self,
        name: &str,
        to: &Self,
        options: &str,
    ) -> Result<(Migrated, Vec<u8>)> {
        let target = Self::listen_plainly(to)?;
        let file = format!("/root/{name}.xl");
        let transport = format!("exec xen-kit record {file} {target}");
        let moved = self.migrate_by(name, options, &transport)?;
        let text = self.output(&format!("xen-kit hex {file}"))?;
        let recorded = bytes_of(&text);
        let recorded = recorded.ok_or(LabError::Text { what: "a recorded stream", text })?;
        Ok((moved, recorded))
    }

    /// Has one plain connection to another host reach a receiver. Returns where it listens.
    fn listen_plainly(to: &Self) -> Result<String> {
        let listen = format!(
            "setsid xen-kit receive {PLAIN_PORT} xl migrate-receive >>/var/log/receiver.log 2>&1 \
             </dev/null &\nuntil netstat -ltn | grep -q :{PLAIN_PORT}; do sleep 0.1; done"
        );
        to.output(&listen)?;
        Ok(format!("{}:{PLAIN_PORT}", address(to.number, 0)))
    }

    fn migrate_by(&self, name: &str, options: &str, transport: &str) -> Result<Migrated> {
        let from = Instant::now();
        let said = self.run(&format!("xl migrate {options} -s '' {name} '{transport}'"))?;
        Ok(Migrated { said, took: from.elapsed() })
    }

    /// Limits what each link carries from this host, or removes the limit.
    ///
    /// # Errors
    /// If `tc` fails.
    pub fn limit(&self, mbit_per_s: Option<u32>) -> Result<()> {
        // By its path: busybox's shell would run its own, which has no `tbf`.
        let one = |nic: usize| match mbit_per_s {
            Some(mbit) => format!(
                "/sbin/tc qdisc replace dev nic{nic} root tbf rate {mbit}mbit burst 32kb \
                 latency 200ms\n"
            ),
            None => format!("/sbin/tc qdisc del dev nic{nic} root 2>/dev/null || true\n"),
        };
        let script: String = (1..=LINKS).map(one).collect();
        self.output(&format!("set -e\n{script}")).map(drop)
    }

    /// Sets a link of this host up or down, counted from 1.
    ///
    /// # Errors
    /// If `ip` fails.
    pub fn set_link(&self, nic: usize, up: bool) -> Result<()> {
        let state = if up { "up" } else { "down" };
        self.output(&format!("ip link set nic{nic} {state}")).map(drop)
    }

    /// Bytes that this host has sent over all links.
    ///
    /// # Errors
    /// If they can't be read.
    pub fn sent_bytes(&self) -> Result<u64> {
        let text = self.output("cat /sys/class/net/nic[1-9]/statistics/tx_bytes")?;
        let counts = text.lines().map(str::parse::<u64>);
        let sum: std::result::Result<u64, _> = counts.sum();
        sum.map_err(|_| LabError::Text { what: "what links have sent", text })
    }
}

impl Drop for XenHost {
    fn drop(&mut self) {
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

/// The bytes that these digits stand for.
fn bytes_of(digits: &str) -> Option<Vec<u8>> {
    let (pairs, rest) = digits.as_bytes().as_chunks::<2>();
    let digit = |digit: u8| char::from(digit).to_digit(16);
    let byte = |[high, low]: &[u8; 2]| u8::try_from(digit(*high)? << 4 | digit(*low)?).ok();
    if rest.is_empty() { pairs.iter().map(byte).collect() } else { None }
}

/// Asks the lab's server in domain 0.
fn ask(script: &str) -> io::Result<Said> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, PORT))?;
    stream.set_read_timeout(Some(COMMAND_MAX))?;
    let length = u32::try_from(script.len()).map_err(io::Error::other)?;
    stream.write_all(&length.to_be_bytes())?;
    stream.write_all(script.as_bytes())?;
    let (mut status, mut length) = ([0; 4], [0; 4]);
    stream.read_exact(&mut status)?;
    stream.read_exact(&mut length)?;
    let length = u32::from_be_bytes(length).min(OUTPUT_BYTES_MAX);
    let mut output = vec![0; length as usize];
    stream.read_exact(&mut output)?;
    let text = String::from_utf8_lossy(&output).into_owned();
    Ok(Said { status: i32::from_be_bytes(status), text })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_stand_for_bytes() {
        assert_eq!(bytes_of("00ff7A"), Some(vec![0, 0xff, 0x7a]));
        assert_eq!(bytes_of(""), Some(Vec::new()));
        for wrong in ["0", "0g", "xen-kit: no such file\n"] {
            assert_eq!(bytes_of(wrong), None, "{wrong}");
        }
    }
}
