//! Droveway's lines in libvirt's `qemu.conf`.
//!
//! They are a separate block at the top, so that removing it leaves the file as it was, including
//! others' changes since.

use std::fmt::Write;
use std::net::{IpAddr, Ipv4Addr};
use std::ops::RangeInclusive;

const BEGIN: &str = "# droveway: begin";
const END: &str = "# droveway: end";
const WHY: &str = "# Sends migrations to this host through Droveway's agents. Written by\n\
                   # `droveway libvirt setup`; `droveway libvirt setup --undo` removes it.\n";

/// The settings that send migrations to a host through the agents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Lines {
    /// The address that other hosts connect to: on their own loopback, where their agents
    /// listen.
    pub(crate) host: Ipv4Addr,
    /// The address at which QEMU listens on this host.
    pub(crate) address: IpAddr,
    /// The ports at both addresses.
    pub(crate) ports: RangeInclusive<u16>,
}

/// Why a `qemu.conf` can't be changed.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unchanged {
    #[error(
        "line {line} sets {key} already: another tool or an administrator has set where libvirt \
         sends migrations to this host. If that is no longer needed, remove the line and run this \
         again"
    )]
    Taken { line: usize, key: String },
    #[error(
        "line {line} sets {key} to {value}, and the agent has ports {ports}: remove that line and \
         run this again, or give this host `carry-ports` in the peers file, the same on all hosts"
    )]
    Ports { line: usize, key: String, value: String, ports: String },
    #[error(
        "line {0} has `{BEGIN}` or `{END}` without the other: remove the rest of that block by hand"
    )]
    Damaged(usize),
}

impl Lines {
    fn settings(&self) -> [(&'static str, String); 4] {
        [
            ("migration_host", self.host.to_string()),
            ("migration_address", self.address.to_string()),
            ("migration_port_min", self.ports.start().to_string()),
            ("migration_port_max", self.ports.end().to_string()),
        ]
    }

    /// The block as it is in the file.
    pub(crate) fn block(&self) -> String {
        let mut block = format!("{BEGIN}\n{WHY}");
        for (key, value) in self.settings() {
            let quote = if key.starts_with("migration_port") { "" } else { "\"" };
            // Writing to a string does not fail.
            let _ = writeln!(block, "{key} = {quote}{value}{quote}");
        }
        block + END + "\n"
    }

    /// A file with these lines, which replace Droveway's earlier ones.
    pub(crate) fn put_into(&self, text: &str) -> Result<String, Unchanged> {
        let others = others(text)?;
        for (line, key, value) in others.iter().filter_map(|&(number, line)| {
            setting(line).map(|(key, value)| (number, key.to_owned(), value.to_owned()))
        }) {
            let ours = self.settings().into_iter().find(|(known, _)| *known == key);
            let Some((_, ours)) = ours else { continue };
            if !key.starts_with("migration_port") {
                return Err(Unchanged::Taken { line, key });
            }
            if value != ours {
                let ports = format!("{} to {}", self.ports.start(), self.ports.end());
                return Err(Unchanged::Ports { line, key, value, ports });
            }
        }
        let others: String = others.into_iter().map(|(_, line)| line).collect();
        Ok(self.block() + &others)
    }
}

/// A file without Droveway's lines.
pub(crate) fn take_out(text: &str) -> Result<String, Unchanged> {
    Ok(others(text)?.into_iter().map(|(_, line)| line).collect())
}

/// The value of a key; the first one if it is set several times, which is what libvirt takes.
pub(crate) fn value<'t>(text: &'t str, key: &str) -> Option<&'t str> {
    let mut settings = text.lines().filter_map(setting);
    settings.find(|(known, _)| *known == key).map(|(_, value)| value)
}

/// The lines that are not Droveway's, each with its number.
fn others(text: &str) -> Result<Vec<(usize, &str)>, Unchanged> {
    let mut others = Vec::new();
    let mut begun = None;
    for (nth, line) in text.split_inclusive('\n').enumerate() {
        let number = nth + 1;
        match (line.trim(), begun) {
            (BEGIN, None) => begun = Some(number),
            (END, Some(_)) => begun = None,
            (BEGIN | END, _) => return Err(Unchanged::Damaged(number)),
            (_, None) => others.push((number, line)),
            (_, Some(_)) => {}
        }
    }
    begun.map_or(Ok(others), |number| Err(Unchanged::Damaged(number)))
}

/// The key that a line sets, and its value without quotes or a trailing comment.
fn setting(line: &str) -> Option<(&str, &str)> {
    let (key, value) = line.split_once('=')?;
    let (key, value) = (key.trim(), value.trim());
    let is_key = key.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    let quote = value.chars().next().filter(|first| matches!(first, '"' | '\''));
    let value = match quote {
        Some(quote) => value.get(1..)?.split(quote).next()?,
        None => value.split('#').next()?.trim(),
    };
    (is_key && !key.is_empty()).then_some((key, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file like those that distributions install.
    const INSTALLED: &str = "# Configuration of the QEMU driver.\n\
                             # Defaults are shown behind a '#'.\n\
                             \n\
                             #migration_host = \"host.example.com\"\n\
                             #migration_address = \"0.0.0.0\"\n\
                             #migration_port_min = 49152\n";
    /// A file that an administrator has changed.
    const CHANGED: &str = "user = \"qemu\"\n\
                           cgroup_device_acl = [\n\
                           \t\"/dev/null\", \"/dev/kvm\",\n\
                           ]\n\
                           migration_port_max = 49215 # as it was\n\
                           security_driver = 'selinux'\n\
                           security_driver = \"none\"";

    fn lines() -> Lines {
        let (host, address) = (Ipv4Addr::new(127, 7, 0, 2), Ipv4Addr::new(10, 0, 0, 2).into());
        Lines { host, address, ports: 49152..=49215 }
    }

    #[test]
    fn a_file_is_restored_to_the_byte() {
        for text in ["", "\n", INSTALLED, CHANGED, "user = \"qemu\"\n\n\n"] {
            let with = lines().put_into(text).unwrap();
            assert!(with.ends_with(text), "{with}");
            assert_eq!(value(&with, "migration_host"), Some("127.7.0.2"));
            assert_eq!(value(&with, "migration_address"), Some("10.0.0.2"));
            assert_eq!(take_out(&with).unwrap(), text);
            assert_eq!(lines().put_into(&with).unwrap(), with, "said twice, done once");
            let mut moved = lines();
            moved.address = Ipv4Addr::new(10, 0, 0, 9).into();
            let again = moved.put_into(&with).unwrap();
            assert_eq!(value(&again, "migration_address"), Some("10.0.0.9"));
            assert_eq!(take_out(&again).unwrap(), text);
        }
    }

    #[test]
    fn settings_of_others_are_left_alone() {
        let taken = |line, key: &str| Unchanged::Taken { line, key: key.to_owned() };
        let text = format!("{INSTALLED}  migration_host=\"10.1.1.1\"\n");
        assert_eq!(lines().put_into(&text), Err(taken(7, "migration_host")));
        // Line numbers are those of the file with the block.
        let later = lines().put_into(INSTALLED).unwrap() + "migration_address = \"::\"\n";
        let number = later.lines().count();
        assert_eq!(lines().put_into(&later), Err(taken(number, "migration_address")));
        let text = "migration_port_min = 50000\n";
        let Err(Unchanged::Ports { line: 1, key, value, ports }) = lines().put_into(text) else {
            panic!("the agent would listen elsewhere")
        };
        assert_eq!((key.as_str(), value.as_str()), ("migration_port_min", "50000"));
        assert_eq!(ports, "49152 to 49215");
    }

    #[test]
    fn half_a_block_is_not_removed() {
        let with = lines().put_into(INSTALLED).unwrap();
        let last = with.lines().position(|line| line == END).unwrap() + 1;
        for (text, line) in [
            (with.replace(&format!("{END}\n"), ""), 1),
            (with.replace(&format!("{BEGIN}\n"), ""), last - 1),
            (format!("{BEGIN}\n{with}"), 2),
        ] {
            assert_eq!(take_out(&text), Err(Unchanged::Damaged(line)), "{text}");
            assert_eq!(lines().put_into(&text), Err(Unchanged::Damaged(line)), "{text}");
        }
    }

    #[test]
    fn values_are_read_as_libvirt_does() {
        assert_eq!(value(INSTALLED, "migration_host"), None);
        assert_eq!(value(CHANGED, "user"), Some("qemu"));
        assert_eq!(value(CHANGED, "migration_port_max"), Some("49215"));
        assert_eq!(value(CHANGED, "security_driver"), Some("selinux"));
        assert_eq!(value("a = \"\"\n", "a"), Some(""));
        assert_eq!(value("a = \"never ends\n", "a"), Some("never ends"));
    }
}
