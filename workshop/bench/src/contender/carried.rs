//! A VM that its owner moves from QEMU to QEMU by QMP, as libvirt does, and that agents carry.

use std::net::Ipv4Addr;
use std::time::Instant;

use serde_json::json;

use super::Ground;
use super::qemu::{End, Events, Failure, Mode, launch};
use lab::error::{FileContext, LabError, Result};
use lab::guest::{Guest, GuestSpec};
use lab::hosts::Host;

/// The first port at which a host's QEMUs wait for VMs, by the host's place in the peers file.
const PORTS: [u16; 2] = [49152, 49216];

/// The VM, in the QEMU that it runs in now.
pub struct Carried {
    mode: Mode,
    spec: GuestSpec,
    end: End,
}

impl Carried {
    /// Starts a guest on the first host; it moves in this mode.
    ///
    /// # Errors
    /// If it does not start.
    pub fn start(ground: &Ground<'_>, mode: Mode, spec: &GuestSpec) -> Result<(Self, Guest)> {
        let end = end(ground, mode, &ground.hosts.a, spec, &[])?;
        let guest = Guest::meet(spec.clone(), &ground.hosts.a)?;
        Ok((Self { mode, spec: spec.clone(), end }, guest))
    }

    /// Moves it to the host with this place in the peers file, counted from 0.
    ///
    /// # Errors
    /// If it doesn't arrive.
    pub fn migrate(&mut self, ground: &Ground<'_>, guest: &Guest, to: usize) -> Result<()> {
        let hosts = ground.hosts;
        let there = [&hosts.a, &hosts.b][to];
        // A QEMU that was killed has left it.
        let talk = there.run_dir.join(format!("{}.talk", self.spec.name));
        if talk.exists() {
            std::fs::remove_file(&talk).at("remove", &talk)?;
        }
        guest.expect_on(there)?;
        let next = end(ground, self.mode, there, &self.spec, &["-incoming", "defer"])?;
        let port = PORTS[to];
        let waits = format!("tcp:{}:{port}", there.addresses[0]);
        next.tell("migrate-incoming", json!({ "uri": waits }))?;
        let until = Instant::now() + ground.timeout;
        let arriving = Events { events: next.qmp.events(), until };
        // The agent listens there for that host.
        let loopback = Ipv4Addr::new(127, 7, 0, if to == 0 { 1 } else { 2 });
        self.end.tell("migrate", json!({ "uri": format!("tcp:{loopback}:{port}") }))?;
        arriving.wait(|event| event.name == "RESUME").map_err(|failure| match failure {
            Failure::Late => {
                LabError::Late { contender: "carried".to_owned(), waited: ground.timeout }
            }
            Failure::Other(reason) => {
                LabError::Migration { contender: "carried".to_owned(), reason }
            }
        })?;
        std::mem::replace(&mut self.end, next).kill();
        Ok(())
    }
}

impl Drop for Carried {
    fn drop(&mut self) {
        self.end.kill();
    }
}

fn end(
    ground: &Ground<'_>,
    mode: Mode,
    host: &Host,
    spec: &GuestSpec,
    more: &[&str],
) -> Result<End> {
    let argv = spec.argv(ground.kit, &ground.kit.qemu);
    launch(mode, ground.downtime_goal, host, &spec.name, &argv, more)
}
