//! The peers file of the cluster.
//!
//! Hosts are only added, and only at its end, because the addresses that lead libvirt to a host
//! follow from its place in the file.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use agent::config::{PeerEntry, parse_peers};
use client::Problem;

use super::hosts::TypedHost;
use crate::libvirt::write;

const HEAD: &str = "# All hosts: the same file on each of them. Add hosts at the end: a host's \
                    position here decides\n# its address for libvirt.\n";

/// The file's path.
pub(crate) fn path(dir: &Path) -> PathBuf {
    dir.join("peers.toml")
}

/// Reads the file; empty if it does not exist yet.
pub(crate) fn read(dir: &Path) -> Result<String, Problem> {
    write::read(&path(dir))
}

/// The text with new hosts added, and all its hosts.
pub(crate) fn extended(
    path: &Path,
    old: &str,
    typed: &[TypedHost],
) -> Result<(String, Vec<PeerEntry>), Problem> {
    let there = parse_peers(path, old)?;
    let mut text = old.to_owned();
    if text.is_empty() {
        text.push_str(HEAD);
    }
    for (nth, host) in typed.iter().enumerate() {
        let before = typed.get(..nth).unwrap_or_default();
        if before.contains(host) {
            continue;
        }
        if before.iter().any(|other| other.name == host.name) {
            let message = format!("{} is named twice: name each host once", host.name);
            return Err(Problem::Typed(message));
        }
        match there.iter().find(|entry| entry.name == host.name) {
            None => text.push_str(&entry(host)),
            Some(entry) => check_same(path, entry, host)?,
        }
    }
    let hosts = parse_peers(path, &text)?;
    check_addresses(&hosts)?;
    if hosts.len() < 2 {
        return Err(Problem::Typed(
            "a VM moves between two hosts or more: name both, like droveway init host-a=10.0.0.1 \
             host-b=10.0.0.2"
                .to_owned(),
        ));
    }
    Ok((text, hosts))
}

fn entry(host: &TypedHost) -> String {
    let mut text =
        format!("\n[[host]]\nname = \"{}\"\naddress = \"{}\"\n", host.name, host.address);
    if !host.nics.is_empty() {
        let nics: Vec<String> = host.nics.iter().map(|nic| format!("\"{nic}\"")).collect();
        // Writing to a string does not fail.
        let _ = writeln!(text, "nics = [{}]", nics.join(", "));
    }
    text
}

/// Checks that a known host is typed as it is in the file.
///
/// NICs may be left out, because they may have been added by hand.
fn check_same(path: &Path, entry: &PeerEntry, host: &TypedHost) -> Result<(), Problem> {
    if entry.address == host.address && (host.nics.is_empty() || host.nics == entry.nics) {
        return Ok(());
    }
    Err(Problem::Typed(format!(
        "{} has {} already, with another address or other network cards: leave it out here, or, \
         if it has moved, correct it in that file",
        path.display(),
        host.name
    )))
}

fn check_addresses(hosts: &[PeerEntry]) -> Result<(), Problem> {
    for (nth, host) in hosts.iter().enumerate() {
        let mut before = hosts.iter().take(nth);
        if let Some(other) = before.find(|other| other.address == host.address) {
            return Err(Problem::Typed(format!(
                "{} and {} have the same address, {}: give each host its own",
                other.name, host.name, host.address
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extend(old: &str, typed: &[&str]) -> Result<String, String> {
        let typed: Vec<TypedHost> = typed.iter().map(|text| text.parse().unwrap()).collect();
        let extended = extended(Path::new("peers.toml"), old, &typed);
        extended.map(|(text, _)| text).map_err(|error| error.to_string())
    }

    #[test]
    fn hosts_are_added_at_the_end_and_what_was_there_stays() {
        let two = extend("", &["a=10.0.0.1", "b=10.0.0.2:7900,10.0.1.2"]).unwrap();
        assert!(two.ends_with(
            "[[host]]\nname = \"b\"\naddress = \"10.0.0.2:7900\"\nnics = [\"10.0.1.2\"]\n"
        ));
        assert_eq!(extend(&two, &["b=10.0.0.2:7900", "a=10.0.0.1"]), Ok(two.clone()));
        assert_eq!(extend(&two, &[]), Ok(two.clone()));
        let by_hand = format!("{two}rack = \"r1\" # upstairs");
        let three = extend(&by_hand, &["0=10.0.0.3", "0=10.0.0.3"]).unwrap();
        let added = three.strip_prefix(&by_hand).unwrap();
        assert_eq!(added, "\n[[host]]\nname = \"0\"\naddress = \"10.0.0.3:7800\"\n");
    }

    #[test]
    fn invalid_hosts_are_refused() {
        let two = extend("", &["a=10.0.0.1", "b=10.0.0.2"]).unwrap();
        for (old, typed, says) in [
            ("", &["a=10.0.0.1"][..], "two hosts or more"),
            ("", &["a=10.0.0.1", "a=10.0.0.2"], "a is named twice"),
            ("", &["a=10.0.0.1", "b=10.0.0.1"], "a and b have the same address"),
            (&two, &["c=10.0.0.2"], "b and c have the same address"),
            (&two, &["a=10.0.0.3"], "peers.toml has a already"),
            (&two, &["a=10.0.0.1,10.0.1.1"], "peers.toml has a already"),
            ("host = 3", &["a=10.0.0.1", "b=10.0.0.2"], "peers.toml:1: "),
        ] {
            let error = extend(old, typed).unwrap_err();
            assert!(error.contains(says), "{typed:?}: {error}");
        }
    }
}
