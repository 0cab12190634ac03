//! The command line.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use lab::hosts::RUN_DIR;
use serde_json::{Value, json};

use super::{Domain, State, Store, receiver, sender};

/// The directory of a host's domains.
const HOME: &str = "xen";
/// The first line of `xl list`, without its end.
const HEAD: &str = "Name                                        ID   Mem VCPUs\tState\tTime(s)";
/// What follows it with `-v`.
const MORE: &str = "   UUID                            Reason-Code\tSecurity Label";
const NO_UUID: &str = "00000000-0000-0000-0000-000000000000";

/// Runs a command, given in these words.
#[must_use]
pub fn run(words: &[String]) -> ExitCode {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match perform(&words) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("fake-xl: {error}");
            ExitCode::FAILURE
        }
    }
}

fn perform(words: &[&str]) -> io::Result<bool> {
    let store = Store::open(PathBuf::from(RUN_DIR).join(HOME))?;
    // Options before the command.
    let at = words.iter().position(|word| !word.starts_with('-')).unwrap_or(words.len());
    match words[at..] {
        ["list", ref rest @ ..] => list(&store, rest)?,
        ["migrate", ref rest @ ..] => return migrate(&store, rest),
        ["migrate-receive", ..] => {
            let (mut input, mut output) = (io::stdin().lock(), io::stdout().lock());
            return receiver::receive(&store, &mut input, &mut output);
        }
        ["destroy", name] | ["destroy", "-f", name] => store.domain(name)?.destroy()?,
        ["domid", name] => print(&format!("{}\n", store.domain(name)?.id()))?,
        ["domname", id] => print(&format!("{}\n", store.domain(id)?.name()))?,
        ["rename", from, to] => store.domain(from)?.rename(to)?,
        ["unpause", name] => store.domain(name)?.set(State::Running)?,
        ["resume", ..] => return Err(io::Error::other("command not implemented")),
        _ => return Err(io::Error::other(format!("unknown command {words:?}"))),
    }
    Ok(true)
}

fn print(text: &str) -> io::Result<()> {
    io::stdout().write_all(text.as_bytes())
}

fn list(store: &Store, words: &[&str]) -> io::Result<()> {
    let (options, names): (Vec<&str>, Vec<&str>) =
        words.iter().copied().partition(|word| word.starts_with('-'));
    let domains: Vec<Domain> = match names[..] {
        // Those that end meanwhile are left out.
        [] => store.names()?.iter().filter_map(|name| store.domain(name).ok()).collect(),
        _ => names.iter().map(|name| store.domain(name)).collect::<io::Result<_>>()?,
    };
    if options.iter().any(|option| ["-l", "--long"].contains(option)) {
        let all: Vec<Value> = domains.iter().filter_map(|one| long(one).ok()).collect();
        return print(&format!("{}\n", Value::from(all)));
    }
    let is_verbose = options.iter().any(|option| ["-v", "--verbose"].contains(option));
    let (mut text, more) = (HEAD.to_owned(), if is_verbose { MORE } else { "" });
    text += more;
    text += "\n";
    if names.is_empty() {
        text += &row("Domain-0", "0", "r-----", is_verbose.then_some(NO_UUID));
    }
    for domain in &domains {
        let (Ok(config), Ok(state)) = (domain.config(), domain.state()) else { continue };
        let uuid = config["c_info"]["uuid"].as_str().filter(|_| is_verbose);
        text += &row(domain.name(), &domain.id(), state.letters(), uuid);
    }
    print(&text)
}

fn long(domain: &Domain) -> io::Result<Value> {
    let id = domain.id().parse::<u32>().unwrap_or_default();
    let mut config = domain.config()?;
    config["c_info"]["name"] = domain.name().into();
    Ok(json!({ "domid": id, "config": config }))
}

fn row(name: &str, id: &str, letters: &str, uuid: Option<&str>) -> String {
    let more = uuid.map(|uuid| format!(" {uuid}        -                -"));
    let more = more.unwrap_or_default();
    format!("{name:<40} {id:>5}    16     1     {letters}       1.5{more}\n")
}

fn migrate(store: &Store, words: &[&str]) -> io::Result<bool> {
    let (mut transport, mut verifies, mut names) = ("ssh", false, Vec::new());
    let mut words = words.iter();
    while let Some(word) = words.next() {
        match *word {
            "-s" => transport = words.next().copied().unwrap_or_default(),
            "--debug" => verifies = true,
            option if option.starts_with('-') => {}
            name => names.push(name),
        }
    }
    let [name, host] = names[..] else {
        return Err(io::Error::other("migrate takes a domain and a host"));
    };
    if !transport.is_empty() {
        return Err(io::Error::other("only `-s ''`, with a command in place of the host"));
    }
    sender::migrate(store, store.domain(name)?, host, verifies)
}
