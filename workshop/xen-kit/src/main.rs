//! `xen-kit`, one program without libraries for the lab's emulated Xen hosts:
//!
//! - as `/init` of a domain, it fills memory, rewrites it and checks it;
//! - in domain 0, `serve PORT` runs the lab's commands;
//! - `send ADDRESS` and `receive PORT PROGRAM [ARGUMENT]...` are a transport of `xl migrate` over
//!   one plain TCP connection, to compare others with;
//! - `record FILE ADDRESS` is `send`, and records what xl writes, without the contents of pages;
//! - `hex FILE` prints a file for the lab.

#![forbid(unsafe_code)]

mod commands;
mod guest;
mod recorder;
mod transport;

use std::env;
use std::process::{self, ExitCode};

const USAGE: &str = "xen-kit serve PORT | send ADDRESS | record FILE ADDRESS | \
    receive PORT PROGRAM [ARGUMENT]... | hex FILE";

fn main() -> ExitCode {
    if process::id() == 1 {
        guest::run();
    }
    let words: Vec<String> = env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let done = match words[..] {
        ["serve", port] => commands::serve(port),
        ["send", address] => transport::send(address, None),
        ["record", file, address] => {
            recorder::Recorder::create(file).and_then(|it| transport::send(address, Some(it)))
        }
        ["hex", file] => recorder::print(file),
        ["receive", port, program, ref arguments @ ..] => {
            transport::receive(port, program, arguments)
        }
        _ => Err(std::io::Error::other(USAGE)),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xen-kit: {error}");
            ExitCode::FAILURE
        }
    }
}
