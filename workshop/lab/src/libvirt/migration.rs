//! `virsh migrate`, and commands during it.

use std::collections::BTreeMap;
use std::io::Read;
use std::process::{Child, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::Libvirtd;
use crate::error::{LabError, Result, SystemContext};
use crate::hosts::Host;

/// How a domain is moved.
#[derive(Clone, Debug, Default)]
pub struct Migration {
    /// The source's libvirtd talks to the destination's, instead of `virsh`.
    pub p2p: bool,
    /// `--parallel`, with so many connections.
    pub parallel: Option<u8>,
    /// Destination of the stream, if libvirt isn't to choose it.
    pub uri: Option<String>,
    /// Whether its disks are copied.
    pub copy_storage: bool,
    /// Destination of the disks, if libvirt isn't to choose it.
    pub disks_uri: Option<String>,
    /// More arguments.
    pub more: Vec<String>,
}

impl Migration {
    /// The arguments of `virsh`.
    #[must_use]
    pub fn args(&self, domain: &str, destination: &str) -> Vec<String> {
        let mut args: Vec<String> =
            ["migrate", "--live", domain, "--desturi", destination].map(str::to_owned).to_vec();
        if self.p2p {
            args.push("--p2p".to_owned());
        }
        if let Some(connections) = self.parallel {
            let connections = connections.to_string();
            args.extend(["--parallel", "--parallel-connections", &connections].map(str::to_owned));
        }
        if self.copy_storage {
            args.push("--copy-storage-all".to_owned());
        }
        for (flag, uri) in [("--migrateuri", &self.uri), ("--disks-uri", &self.disks_uri)] {
            args.extend(uri.iter().flat_map(|uri| [flag.to_owned(), uri.clone()]));
        }
        args.extend(self.more.iter().cloned());
        args
    }

    /// Begins to migrate a domain from `host`.
    ///
    /// # Errors
    /// If `virsh` can't be started.
    pub fn begin(
        &self,
        domain: &str,
        daemon: &Libvirtd,
        host: &Host,
        destination: &Libvirtd,
    ) -> Result<Migrating> {
        let args = self.args(domain, &destination.uri());
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let mut command = daemon.virsh(host, &args);
        let spawned = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
        let mut child = spawned.doing("start virsh")?;
        let mut stderr = child.stderr.take();
        let said = std::thread::spawn(move || {
            let mut said = String::new();
            // Output that isn't text is of no use to a reader.
            let _ = stderr.as_mut().map(|stderr| stderr.read_to_string(&mut said));
            said
        });
        Ok(Migrating { child, said, domain: domain.to_owned() })
    }
}

/// A running `virsh migrate`.
#[derive(Debug)]
pub struct Migrating {
    child: Child,
    said: JoinHandle<String>,
    domain: String,
}

/// How it ended.
#[derive(Debug)]
pub struct Ended {
    /// Whether `virsh` reports that the domain has moved.
    pub success: bool,
    /// Its standard error.
    pub said: String,
}

impl Migrating {
    /// Whether it still runs.
    #[must_use]
    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// The job at the source, as fields of `virsh domjobinfo`; empty before it has started and once
    /// it has ended.
    ///
    /// # Errors
    /// If `virsh` can't be started.
    pub fn job(&self, daemon: &Libvirtd, host: &Host) -> Result<BTreeMap<String, String>> {
        let output = daemon.virsh(host, &["domjobinfo", &self.domain]).output();
        let output = output.doing("run virsh")?;
        Ok(fields(&String::from_utf8_lossy(&output.stdout)))
    }

    /// Has the libvirtd at the source cancel it.
    ///
    /// # Errors
    /// If it refuses.
    pub fn abort(&self, daemon: &Libvirtd, host: &Host) -> Result<()> {
        daemon.tells(host, &["domjobabort", &self.domain]).map(drop)
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// If there is none in time; `virsh` is killed then.
    pub fn wait(mut self, at_most: Duration) -> Result<Ended> {
        let until = Instant::now() + at_most;
        let status = loop {
            if let Some(status) = self.child.try_wait().doing("wait for virsh")? {
                break status;
            }
            if Instant::now() > until {
                let _ = self.child.kill();
                let _ = self.child.wait();
                let contender = format!("virsh migrate {}", self.domain);
                return Err(LabError::Late { contender, waited: at_most });
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        let said = self.said.join().unwrap_or_default();
        Ok(Ended { success: status.success(), said })
    }
}

/// Parses lines of `Name:   value`.
fn fields(text: &str) -> BTreeMap<String, String> {
    let pair = |line: &str| {
        let (name, value) = line.split_once(':')?;
        Some((name.trim().to_owned(), value.split_whitespace().collect::<Vec<_>>().join(" ")))
    };
    text.lines().filter_map(pair).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn virsh_is_told_what_was_chosen() {
        let plain = Migration::default().args("web1", "qemu:///x");
        assert_eq!(plain, ["migrate", "--live", "web1", "--desturi", "qemu:///x"]);
        let all = Migration {
            p2p: true,
            parallel: Some(4),
            uri: Some("unix:///a".to_owned()),
            copy_storage: true,
            disks_uri: Some("unix:///b".to_owned()),
            more: vec!["--auto-converge".to_owned()],
        };
        let words = all.args("web1", "d").join(" ");
        let told = "migrate --live web1 --desturi d --p2p --parallel --parallel-connections 4 \
                    --copy-storage-all --migrateuri unix:///a --disks-uri unix:///b --auto-converge";
        assert_eq!(words, told);
    }

    #[test]
    fn a_job_is_read_by_name() {
        let text = "Job type:         Unbounded   \nData remaining:   12.000 MiB\n\n";
        let job = fields(text);
        assert_eq!(job["Job type"], "Unbounded");
        assert_eq!(job["Data remaining"], "12.000 MiB");
        assert!(fields("").is_empty());
    }
}
