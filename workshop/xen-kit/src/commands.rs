//! Runs the lab's commands: for each connection a script, of which the length comes first. The
//! answer is the exit code, the length of the output, and the output with the errors. Numbers have
//! four bytes, the highest first.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::thread;

const SCRIPT_BYTES_MAX: u32 = 1 << 20;
/// Exit code of a shell that a signal has ended.
const SIGNALLED: i32 = 255;

/// Serves at a port of all addresses, for ever.
pub(crate) fn serve(port: &str) -> io::Result<()> {
    let port: u16 = port.parse().map_err(io::Error::other)?;
    for stream in TcpListener::bind(("0.0.0.0", port))?.incoming() {
        let stream = stream?;
        thread::spawn(move || {
            if let Err(error) = answer(stream) {
                eprintln!("xen-kit: a command: {error}");
            }
        });
    }
    Ok(())
}

fn answer(mut stream: TcpStream) -> io::Result<()> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let length = u32::from_be_bytes(length).min(SCRIPT_BYTES_MAX);
    let mut script = vec![0; length as usize];
    stream.read_exact(&mut script)?;
    let script = String::from_utf8(script).map_err(io::Error::other)?;
    // Both into one, in their order.
    let mut shell = Command::new("/bin/sh");
    shell.args(["-c", &format!("exec 2>&1\n{script}")]).stdin(Stdio::null());
    let output = shell.output()?;
    let status = output.status.code().unwrap_or(SIGNALLED);
    let length = u32::try_from(output.stdout.len()).map_err(io::Error::other)?;
    stream.write_all(&status.to_be_bytes())?;
    stream.write_all(&length.to_be_bytes())?;
    stream.write_all(&output.stdout)
}
