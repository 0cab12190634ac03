//! The agent's settings that a first set-up writes: the host's name, the locations of the peers file
//! and the certificate, and QEMU's user.
//!
//! All others are the operator's, and existing ones stay.

use std::path::Path;

use agent::config::PeerEntry;
use toml::{Table, Value};

const COMMENT: &str = "# By `droveway init`.\n";
/// The line of the package's file below which the settings are added.
const EXAMPLE: &str = "# name = ";

/// The file of a host that has none yet; without a user QEMU runs as the agent's.
pub(crate) fn of(host: &PeerEntry, qemu_user: Option<&str>) -> String {
    let mut text =
        format!("{COMMENT}name = \"{}\"\npeers = \"peers.toml\"\ntls = \"tls\"\n", host.name);
    if let Some(user) = qemu_user {
        text.push_str(&format!("qemu-user = {}\n", Value::from(user)));
    }
    // Lanes connect to each of the host's NICs.
    if !host.nics.is_empty() {
        let any = if host.address.is_ipv4() { "0.0.0.0" } else { "[::]" };
        text.push_str(&format!("listen = \"{any}:{}\"\n", host.address.port()));
    }
    text
}

/// The host that a file is for.
pub(crate) fn name(text: &str) -> Option<String> {
    let table: Table = text.parse().ok()?;
    Some(table.get("name")?.as_str()?.to_owned())
}

/// An existing file with those of the wanted settings that it lacks, and their names.
///
/// `dir` is the file's directory.
pub(crate) fn merged(old: &str, wanted: &str, dir: &Path) -> Result<(String, Vec<String>), String> {
    let there = table(old)?;
    if there.get("insecure-plaintext") == Some(&Value::Boolean(true)) {
        return Err(
            "has insecure-plaintext, which makes certificates useless: remove that line".to_owned()
        );
    }
    let mut lines = String::new();
    let mut added = Vec::new();
    for (key, value) in &table(wanted)? {
        match there.get(key) {
            None => {
                lines.push_str(&format!("{key} = {value}\n"));
                added.push(key.clone());
            }
            Some(found) => check_same(key, found, value, dir)?,
        }
    }
    if added.is_empty() {
        return Ok((old.to_owned(), added));
    }
    let (before, after) = old.split_at(place_in(old));
    Ok((format!("{before}{COMMENT}{lines}{after}"), added))
}

fn table(text: &str) -> Result<Table, String> {
    text.parse().map_err(|error: toml::de::Error| {
        format!("is no agent's file, correct it: {}", error.message().replace('\n', " "))
    })
}

fn check_same(key: &str, found: &Value, value: &Value, dir: &Path) -> Result<(), String> {
    let is_same = match (key, found.as_str(), value.as_str()) {
        // The operator chooses the address to listen at.
        ("listen", ..) => true,
        ("peers" | "tls", Some(found), Some(value)) => dir.join(found) == dir.join(value),
        _ => found == value,
    };
    if is_same {
        return Ok(());
    }
    Err(format!(
        "has {key} = {found}, and the archive {key} = {value}: if the archive is this host's, \
         remove that line"
    ))
}

/// The place for new lines: below the example of the package's file, or at the beginning.
///
/// After the first table's head, they would belong to that table.
fn place_in(text: &str) -> usize {
    let mut place = 0;
    for line in text.split_inclusive('\n') {
        place += line.len();
        if line.starts_with('[') {
            break;
        }
        if line.starts_with(EXAMPLE) && line.ends_with('\n') {
            return place;
        }
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    const PACKAGED: &str = include_str!("../../../../dist/agent.toml");

    fn wanted(nics: &str) -> String {
        let peers = format!("[[host]]\nname = 'a'\naddress = '10.0.0.1:7801'\n{nics}");
        of(&agent::config::parse_peers(Path::new("peers.toml"), &peers).unwrap()[0], Some("qemu"))
    }

    fn merge(old: &str) -> Result<(String, Vec<String>), String> {
        merged(old, &wanted("nics = ['10.0.1.1']"), Path::new("/etc/droveway"))
    }

    #[test]
    fn the_packages_file_gets_what_it_lacks_and_keeps_the_rest() {
        let (text, added) = merge(PACKAGED).unwrap();
        assert_eq!(added, ["listen", "name", "qemu-user", "tls"]);
        let lines = "# name = \"host-a\"\n# By `droveway init`.\nlisten = \"0.0.0.0:7801\"\nname = \
                     \"a\"\nqemu-user = \"qemu\"\ntls = \"tls\"\n";
        assert!(text.contains(lines), "{text}");
        let without = text.replace(lines, "# name = \"host-a\"\n");
        assert_eq!(without, PACKAGED);
        assert_eq!(name(&text).as_deref(), Some("a"));
        assert_eq!(merge(&text), Ok((text.clone(), Vec::new())));
    }

    #[test]
    fn lines_never_become_a_tables() {
        for old in ["", "[carry]\nsockets = 9\n", "pool-mib = 64", "[waits]\n# name = \"x\"\n"] {
            let (text, _) = merge(old).unwrap();
            assert!(text.ends_with(old), "{text}");
            assert_eq!(name(&text).as_deref(), Some("a"), "{text}");
        }
    }

    #[test]
    fn what_an_operator_has_chosen_stays_or_is_an_error() {
        let same = "name = 'a'\npeers = '/etc/droveway/peers.toml'\ntls = 'tls'\nlisten = \
                    '10.0.0.1:7801'\nqemu-user = 'qemu'\n";
        assert_eq!(merge(same), Ok((same.to_owned(), Vec::new())));
        for (old, says) in [
            ("name = 'b'", "has name = \"b\", and the archive name = \"a\""),
            ("tls = '/etc/pki'", "has tls = \"/etc/pki\""),
            ("qemu-user = 'kvm'", "has qemu-user = \"kvm\", and the archive qemu-user = \"qemu\""),
            ("insecure-plaintext = true", "remove that line"),
            ("name = ", "is no agent's file"),
        ] {
            let error = merge(old).unwrap_err();
            assert!(error.contains(says) && !error.contains('\n'), "{old}: {error}");
        }
    }

    #[test]
    fn a_host_with_one_network_listens_at_its_own_address() {
        assert!(!wanted("").contains("listen"));
    }
}
