//! Two emulated hosts with Xen: QEMUs under TCG, whose domains 0 have Xen's tools and our agent.
//! They have four links between them, and one card by which the lab runs commands.
//!
//! They are slow: a host boots in half a minute, a domain in ten seconds, and each moves some ten
//! MB/s. So only what shows in bytes, in states or over slow links is measured.

mod domain;
mod host;
mod machine;

pub use domain::{Beat, DomainSpec, Virtualization};
pub use host::{Migrated, Said, XenHost};

use std::path::Path;

use tempfile::TempDir;

use crate::certificates::Certificates;
use crate::error::{Result, SystemContext};
use crate::hosts::{Hosts, Link, scratch};
use crate::setup::{Kit, Xen};

/// Links between the hosts.
pub const LINKS: usize = 4;
/// The hosts' names, as in the peers file.
pub const NAMES: [&str; 2] = ["host-a", "host-b"];

/// Two hosts. Dropping it ends both.
#[derive(Debug)]
pub struct XenHosts {
    /// Where domains are created.
    pub a: XenHost,
    /// Where they go.
    pub b: XenHost,
    /// Ends all QEMUs.
    _hosts: Hosts,
    _sockets: TempDir,
}

impl XenHosts {
    /// Boots both, with this `droveway`, and starts their agents.
    ///
    /// # Errors
    /// If one doesn't come up; with the end of its console.
    pub fn boot(kit: &Kit, xen: &Xen, droveway: &Path) -> Result<Self> {
        let hosts = Hosts::new(Link::unshaped())?;
        let certificates = Certificates::new()?;
        let sockets = scratch("xen")?;
        let overlay = |number: usize| {
            let host = [&hosts.a, &hosts.b][number];
            certificates.give(host, NAMES[number])?;
            machine::overlay(number, xen, droveway, &host.run_dir.join("tls"))
        };
        let overlays = [overlay(0)?, overlay(1)?];
        let start = |number: usize| {
            let host = [&hosts.a, &hosts.b][number];
            let overlay = &overlays[number];
            let qemu = machine::start(kit, xen, host, number, overlay, sockets.path())?;
            XenHost::new(host, number, qemu).doing("enter a host's network")
        };
        let (a, b) = (start(0)?, start(1)?);
        let both = Self { a, b, _hosts: hosts, _sockets: sockets };
        for host in [&both.a, &both.b] {
            host.wait_up()?;
            host.start_agent(LINKS)?;
        }
        Ok(both)
    }

    /// The other host.
    #[must_use]
    pub fn other(&self, host: &XenHost) -> &XenHost {
        if host.name() == self.a.name() { &self.b } else { &self.a }
    }
}
