//! `-global migration.switchover-ack-legacy`, with which QEMU from 11.1 on waits for
//! an acknowledgement of each switchover, and not only if one of the VM's devices
//! requests it. Older versions always wait, and refuse to start with a property that
//! they don't know.

use super::machine::pieces;
use super::{CommandLine, options};

/// The type of QEMU's migration object, which has the property.
pub(crate) const MIGRATION: &str = "migration";
/// The property.
pub(crate) const LEGACY_ACK: &str = "switchover-ack-legacy";
/// The argument that [`CommandLine::with_switchover_ack`] adds.
const OURS: &str = "migration.switchover-ack-legacy=on";

impl CommandLine {
    /// Makes QEMU wait for the acknowledgement, unless the line sets the property
    /// already. Only for a QEMU that knows the property.
    #[must_use]
    pub fn with_switchover_ack(&self) -> Self {
        match legacy_ack(&self.argv()) {
            Some(_) => self.clone(),
            None => self.clone().and("-global", OURS),
        }
    }
}

/// The value of the property on a command line; the last setting counts.
pub(crate) fn legacy_ack(argv: &[String]) -> Option<bool> {
    let mut said = None;
    let mut words = argv.iter().skip(1);
    while let Some(word) = words.next() {
        let Some(name) = options::name(word) else { continue };
        let argument = options::takes_argument(name).then(|| words.next()).flatten();
        if let Some(argument) = argument.filter(|_| name == "global") {
            said = value(argument).map_or(said, Some);
        }
    }
    said
}

/// Whether an option is the one that [`CommandLine::with_switchover_ack`] adds.
pub(super) fn is_ours(option: &str, argument: &str) -> bool {
    option == "global" && argument == OURS
}

/// The value of the property in one `-global`, in either of its forms. QEMU doesn't
/// start with an invalid value, so any result will do for it.
fn value(global: &str) -> Option<bool> {
    let is_on = |value: &str| matches!(value, "on" | "yes" | "true" | "y");
    let short = global
        .strip_prefix(MIGRATION)
        .and_then(|rest| rest.strip_prefix('.')?.strip_prefix(LEGACY_ACK)?.strip_prefix('='));
    if let Some(value) = short {
        return Some(is_on(value));
    }
    let pieces = pieces(global);
    let of = |key: &str| pieces.iter().find_map(|piece| piece.strip_prefix(key)?.strip_prefix('='));
    let is_it = of("driver") == Some(MIGRATION) && of("property") == Some(LEGACY_ACK);
    of("value").filter(|_| is_it).map(is_on)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn the_last_setting_counts_in_either_form() {
        let long = "driver=migration,property=switchover-ack-legacy,value=";
        for (line, expected) in [
            ("qemu -m 1G".to_owned(), None),
            (format!("qemu -global {OURS}"), Some(true)),
            (format!("qemu --global {OURS} -global {long}off"), Some(false)),
            (format!("qemu -global {long}yes"), Some(true)),
            ("qemu -global migration.switchover-ack-legacy=false".to_owned(), Some(false)),
            // Others, and the same words where they mean something else.
            ("qemu -global migration.store-global-state=on".to_owned(), None),
            ("qemu -global ICH9-LPC.disable_s3=1".to_owned(), None),
            (format!("qemu -name {OURS} {OURS}"), None),
            ("qemu -global".to_owned(), None),
        ] {
            assert_eq!(legacy_ack(&words(&line)), expected, "{line}");
        }
    }

    #[test]
    fn it_is_added_if_not_set_and_removed_again() {
        for line in ["qemu -m 1G", "qemu -global ICH9-LPC.disable_s3=1"] {
            let typed = words(line);
            let started = CommandLine::parse(&typed).unwrap().with_switchover_ack().argv();
            assert_eq!(started[..typed.len()], typed);
            assert_eq!(started[typed.len()..], ["-global", OURS]);
            assert_eq!(CommandLine::of_running(&started), typed);
        }
        for said in ["off", "on"] {
            let long = format!("driver=migration,property=switchover-ack-legacy,value={said}");
            let typed = words(&format!("qemu -global {long}"));
            let started = CommandLine::parse(&typed).unwrap().with_switchover_ack().argv();
            assert_eq!(started, typed);
            assert_eq!(CommandLine::of_running(&started), typed);
        }
    }
}
