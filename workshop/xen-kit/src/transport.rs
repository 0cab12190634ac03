//! A transport of `xl migrate` over one plain TCP connection.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::thread;

use crate::recorder::Recorder;

const PIECE_BYTES: usize = 128 << 10;

/// Copies pieces as they come: a text of xl's handshake must not wait for more.
fn copy(from: impl Read, to: impl Write) -> io::Result<()> {
    copy_recorded(from, to, None)
}

/// The same, and records them first: what has arrived was recorded.
fn copy_recorded(
    mut from: impl Read,
    mut to: impl Write,
    mut recorder: Option<Recorder>,
) -> io::Result<()> {
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        let bytes = from.read(&mut piece)?;
        if bytes == 0 {
            return Ok(());
        }
        if let Some(recorder) = &mut recorder {
            recorder.push(&piece[..bytes])?;
        }
        to.write_all(&piece[..bytes])?;
    }
}

/// Sends standard input, and writes what comes back to standard output.
pub(crate) fn send(address: &str, recorder: Option<Recorder>) -> io::Result<()> {
    let stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    let input = File::from(io::stdin().as_fd().try_clone_to_owned()?);
    let output = File::from(io::stdout().as_fd().try_clone_to_owned()?);
    let sender = stream.try_clone()?;
    // It may wait for input when the receiver has ended, and this process with it.
    thread::spawn(move || {
        if let Err(error) = copy_recorded(input, &sender, recorder) {
            eprintln!("xen-kit: {error}");
        }
        let _ = sender.shutdown(Shutdown::Write);
    });
    copy(stream, output)
}

/// Gives a program what one connection sends, and returns its output.
pub(crate) fn receive(port: &str, program: &str, arguments: &[&str]) -> io::Result<()> {
    let port: u16 = port.parse().map_err(io::Error::other)?;
    let (stream, _) = TcpListener::bind(("0.0.0.0", port))?.accept()?;
    stream.set_nodelay(true)?;
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn()?;
    let (input, output) = (child.stdin.take(), child.stdout.take());
    let (input, output) = input.zip(output).ok_or_else(|| io::Error::other("no pipes"))?;
    let incoming = stream.try_clone()?;
    thread::spawn(move || copy(incoming, input));
    copy(output, &stream)?;
    stream.shutdown(Shutdown::Write)?;
    let status = child.wait()?;
    if status.success() { Ok(()) } else { Err(io::Error::other(format!("{program}: {status}"))) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_gets_what_was_sent_and_its_answer_comes_back() {
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let receiving = thread::spawn(move || {
            receive(&free.to_string(), "sh", &["-c", "read line; printf 'got %s' \"$line\""])
        });
        let mut stream = loop {
            if let Ok(stream) = TcpStream::connect(("127.0.0.1", free)) {
                break stream;
            }
            thread::yield_now();
        };
        stream.write_all(b"ready\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert_eq!(answer, "got ready");
        receiving.join().unwrap().unwrap();
    }
}
