//! Addresses and files by which programs of a host know a VM's QEMU. Two QEMUs can't have them.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use lab::hosts::RUN_DIR;

use crate::{Side, World, own_qmp_argument, until};

const VNC_DISPLAY: u16 = 7;
const VNC_PORT: u16 = 5900 + VNC_DISPLAY;
const SERIAL_PORT: u16 = 4444;
/// How long one attempt waits for an answer.
const PATIENCE: Duration = Duration::from_secs(10);
const PID_FILE: &str = "web1.pid";
/// What a server of telnet begins with.
const IAC: u8 = 0xff;
/// The version of RFB with which a VNC server begins.
const RFB: &[u8; 12] = b"RFB 003.008\n";

/// Arguments of QEMU for the VM `web1`: a VNC server, a port of the guest by telnet, a monitor at a
/// unix socket, and a PID file.
#[must_use]
pub fn addresses() -> Vec<String> {
    let fixed = [
        "-vnc".to_owned(),
        format!("127.0.0.1:{VNC_DISPLAY}"),
        "-serial".to_owned(),
        format!("telnet:127.0.0.1:{SERIAL_PORT},server=on,wait=off"),
        "-pidfile".to_owned(),
        format!("{RUN_DIR}/{PID_FILE}"),
    ];
    fixed.into_iter().chain(own_qmp_argument("web1")).collect()
}

/// Asserts that the VM's QEMU has all of them, and that nothing else was made for another one.
///
/// # Panics
/// If not.
pub fn assert_addresses(world: &World, at: Side) {
    let pid = world.vm(at, "web1").expect("its VM is listed").pid;
    let dir = &world.host(at).run_dir;
    let written = || fs::read_to_string(dir.join(PID_FILE)).unwrap_or_default();
    // It gets them after it runs.
    until("its PID file has its number", || written().trim() == pid.to_string());
    until("its VNC server answers", || first_bytes::<12>(world, at, VNC_PORT) == Some(*RFB));
    until("its serial port answers", || first_bytes(world, at, SERIAL_PORT) == Some([IAC]));
    until("its monitor answers", || status(world, at).is_some_and(|text| text.contains("running")));
    until("no hidden socket is left", || {
        let entries = fs::read_dir(dir).unwrap();
        let mut names = entries.map(|entry| entry.unwrap().file_name());
        !names.any(|name| name.to_string_lossy().contains(".droveway-"))
    });
}

/// Asserts that a host on which the VM was has no PID file of it.
///
/// # Panics
/// If it has one.
pub fn assert_no_pid_file(world: &World, at: Side) {
    let file = world.host(at).run_dir.join(PID_FILE);
    until("its PID file is removed", || !file.exists());
}

/// What a server on a host sends first; none if it sends nothing.
fn first_bytes<const N: usize>(world: &World, at: Side, port: u16) -> Option<[u8; N]> {
    let connection = world.host(at).within(|| TcpStream::connect(("127.0.0.1", port)).ok());
    let mut connection = connection?;
    let mut bytes = [0; N];
    connection.set_read_timeout(Some(PATIENCE)).ok()?;
    connection.read_exact(&mut bytes).ok()?;
    Some(bytes)
}

/// The answer of the owner's monitor about the VM's status.
fn status(world: &World, at: Side) -> Option<String> {
    let mut monitor = UnixStream::connect(world.host(at).run_dir.join("web1.own")).ok()?;
    monitor.set_read_timeout(Some(PATIENCE)).ok()?;
    monitor
        .write_all(b"{\"execute\":\"qmp_capabilities\"}{\"execute\":\"query-status\"}\n")
        .ok()?;
    let lines = BufReader::new(monitor).lines();
    lines.map_while(Result::ok).find(|line| line.contains("status"))
}
