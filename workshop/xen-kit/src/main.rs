//! `xen-kit`, one program without libraries for the lab's emulated Xen hosts:
//!
//! - as `/init` of a domain, it fills memory, rewrites it and checks it;
//! - in domain 0, `serve PORT` runs the lab's commands;
//! - `send ADDRESS` and `receive PORT PROGRAM [ARGUMENT]...` are a transport of `xl migrate` over
//!   one plain TCP connection, to compare others with.

#![forbid(unsafe_code)]

mod commands;
mod guest;
mod transport;

use std::env;
use std::process::{self, ExitCode};

const USAGE: &str = "xen-kit serve PORT | send ADDRESS | receive PORT PROGRAM [ARGUMENT]...";

fn main() -> ExitCode {
    if process::id() == 1 {
        guest::run();
    }
    let words: Vec<String> = env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let done = match words[..] {
        ["serve", port] => commands::serve(port),
        ["send", address] => transport::send(address),
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
