//! A part of a benchmark in a process of its own: the lab's program once more, on a host.

use std::io::{self, Read, Write};
use std::process::{Child, Stdio};

use lab::error::{Result, SystemContext};
use lab::hosts::Host;

/// Starts it, and waits until it is [`ready`].
pub(crate) fn start(host: &Host, arguments: &[&str]) -> Result<Child> {
    let own = std::env::current_exe().doing("find the lab's own program")?;
    let mut command = host.command(&own);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = command.spawn().doing("start a part of a benchmark")?;
    let output = child.stdout.as_mut();
    let ready = output.map(|output| output.read_exact(&mut [0]));
    ready.transpose().doing("wait for a part of a benchmark")?;
    Ok(child)
}

/// Reports that it listens.
pub(crate) fn ready() -> io::Result<()> {
    let mut output = io::stdout();
    output.write_all(b"r")?;
    output.flush()
}
