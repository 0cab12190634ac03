//! One plain TCP stream over the same link, as a bound for contenders.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Instant;

use super::part;
use super::result::Run;
use super::scenario::Scenario;
use lab::error::{LabError, Result, SystemContext};
use lab::hosts::Hosts;

const PORT: u16 = 7811;

/// Sends as many bytes as a contender had to move: the content that the guest was ordered to have,
/// and its kernel's memory.
pub(super) fn run(scenario: &Scenario, bytes: u64) -> Result<Run> {
    let hosts = Hosts::new(scenario.link)?;
    let own = std::env::current_exe().doing("find the lab's own program")?;
    let mut sink = part::start(&hosts.b, &["tcp-sink", &PORT.to_string()])?;
    let before = hosts.traffic()?;
    let address = format!("{}:{PORT}", hosts.b.addresses[0]);
    let source = hosts.a.command(&own).args(["tcp-source", &address, &bytes.to_string()]).output();
    let source = source.doing("start a TCP source")?;
    let _ = sink.wait();
    let said = String::from_utf8_lossy(&source.stdout).into_owned();
    let total_s: f64 = said
        .trim()
        .parse()
        .map_err(|_| LabError::Text { what: "the TCP source's time", text: said })?;
    let wire_bytes = (hosts.traffic()? - before).bytes;
    Ok(Run { ok: true, intact: true, total_s, wire_bytes, guest_work: 1.0, ..Run::default() })
}

/// The receiving end, in a process of its own on its host.
///
/// # Errors
/// If the connection fails.
pub fn sink(port: u16) -> std::io::Result<()> {
    let listener = TcpListener::bind(("0.0.0.0", port))?;
    part::ready()?;
    let (mut stream, _) = listener.accept()?;
    let mut buffer = vec![0; 512 << 10];
    while stream.read(&mut buffer)? > 0 {}
    stream.write_all(b"d")
}

/// The sending end: prints the seconds until the receiver has read the last byte.
///
/// # Errors
/// If the connection fails.
pub fn source(address: &str, bytes: u64) -> std::io::Result<()> {
    let mut stream = TcpStream::connect(address)?;
    let buffer = vec![7; 512 << 10];
    let began = Instant::now();
    let mut left = bytes;
    while left > 0 {
        let piece = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
        stream.write_all(&buffer[..piece])?;
        left -= piece as u64;
    }
    stream.shutdown(std::net::Shutdown::Write)?;
    stream.read_exact(&mut [0])?;
    println!("{}", began.elapsed().as_secs_f64());
    Ok(())
}
