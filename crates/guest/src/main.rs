//! `droveway-guest`: waits at the port and answers, or prints once what it would answer.

use std::env;
use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;

use cachemap::{Budget, Summary};
use guest::port::{Port, usual};
use guest::priority;
use guest::serve::{Counted, PROGRAM, serve};
use guest::survey::survey;

const USAGE: &str = "Reports to Droveway which memory of this guest is a copy of what is on its \
disks.

usage: droveway-guest [--port PATH]   wait at the port, and answer
       droveway-guest \
--once          print what would be answered now
       droveway-guest --version

  --port PATH   \
the default is /dev/virtio-ports/org.droveway.guest.0";

/// The command on the command line.
enum Order {
    Serve(Option<PathBuf>),
    Once,
    Version,
    Help,
}

fn main() -> ExitCode {
    let done = match order() {
        Ok(Order::Serve(port)) => wait_and_answer(port),
        Ok(Order::Once) => once(),
        Ok(Order::Version) => print(&format!("droveway-guest {PROGRAM}\n")),
        Ok(Order::Help) => print(&format!("{USAGE}\n")),
        Err(text) => {
            complain(&format!("{text}\n\n{USAGE}"));
            return ExitCode::from(2);
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(text) => {
            complain(&text);
            ExitCode::FAILURE
        }
    }
}

fn order() -> Result<Order, String> {
    let mut words = env::args_os().skip(1);
    let order = match words.next().as_deref().and_then(|word| word.to_str()) {
        None if env::args_os().len() > 1 => return Err("an option is not text".to_owned()),
        None => Order::Serve(None),
        Some("--port") => {
            let path = words.next().ok_or("--port needs a path")?;
            Order::Serve(Some(path.into()))
        }
        Some("--once") => Order::Once,
        Some("--version" | "-V") => Order::Version,
        Some("--help" | "-h") => Order::Help,
        Some(other) => return Err(format!("{other} is not known")),
    };
    match words.next() {
        None => Ok(order),
        Some(word) => Err(format!("{} is too much", word.display())),
    }
}

/// Raises the limit of open files, and lowers the priority.
fn prepare() {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let more = rustix::process::Rlimit { current: limit.maximum, ..limit };
    if let Err(error) = rustix::process::setrlimit(rustix::process::Resource::Nofile, more) {
        complain(&format!(
            "cannot raise the limit of open files, so each answer takes longer: {error}"
        ));
    }
    if let Err(error) = priority::give_way() {
        complain(&format!("the system refuses another priority: {error}"));
    }
}

fn wait_and_answer(port: Option<PathBuf>) -> Result<(), String> {
    prepare();
    let path = port.unwrap_or_else(usual);
    let at = |error| format!("{}: {error}", path.display());
    let mut port = Port::open(&path).map_err(at)?;
    serve(&mut port).map_err(at)
}

fn once() -> Result<(), String> {
    prepare();
    let mut counted = Counted::default();
    let budget = Budget { cpu_percent: 100, time_ms: 60_000, ..Budget::default() };
    let summary = survey(budget, &mut counted).map_err(|error| error.to_string())?;
    let (runs, pages) = counted.runs_and_pages();
    let mut text = String::new();
    for device in &counted.devices {
        let mib = device.sectors / 2048;
        let serial = if device.serial.is_empty() { "none" } else { &device.serial };
        let (name, address) = (&device.name, &device.address);
        let _ = writeln!(text, "disk {name}: {mib} MiB, serial {serial}, at {address}");
    }
    let _ = writeln!(text, "{}", Summary { runs, pages, ..summary });
    let _ = writeln!(text, "the answer has {} bytes", counted.bytes);
    print(&text)
}

/// Prints an error. There may be no reader of it either.
fn complain(text: &str) {
    let _ = writeln!(io::stderr(), "droveway-guest: {text}");
}

/// Prints a text. A reader that has closed the output, such as `head`, is no error.
fn print(text: &str) -> Result<(), String> {
    match io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.to_string()),
        _ => Ok(()),
    }
}
