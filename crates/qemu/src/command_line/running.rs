//! The command line of a QEMU that runs.

use super::{CommandLine, QMP_ID, guest_port, has_part, legacy_ack, options};

impl CommandLine {
    /// The command line of a running QEMU, as its owner would type it for another
    /// start: without the options for this start alone, and without those that the
    /// agent has added.
    #[must_use]
    pub fn of_running(argv: &[String]) -> Vec<String> {
        let with_port = Self::has_our_guest_port(argv);
        let mut kept = Vec::new();
        let mut words = argv.iter();
        kept.extend(words.next().cloned());
        while let Some(word) = words.next() {
            let name = options::name(word);
            let argument =
                name.filter(|name| options::takes_argument(name)).and_then(|_| words.next());
            let begins = name.is_some_and(|name| matches!(name, "daemonize" | "incoming"));
            let ours = argument.zip(name).is_some_and(|(argument, name)| {
                is_our_qmp(name, argument)
                    || legacy_ack::is_ours(name, argument)
                    || with_port && guest_port::is_ours(name, argument)
            });
            if !begins && !ours {
                kept.push(word.clone());
                kept.extend(argument.cloned());
            }
        }
        kept
    }

    /// Whether a running QEMU was started to wait for a migration.
    pub(crate) fn waited(argv: &[String]) -> bool {
        argv.iter().any(|word| options::name(word) == Some("incoming"))
    }
}

/// Whether an option is one that [`CommandLine::with_qmp`] adds.
fn is_our_qmp(name: &str, argument: &str) -> bool {
    match name {
        "chardev" => has_part(argument, &format!("id={QMP_ID}")),
        "mon" => has_part(argument, &format!("chardev={QMP_ID}")),
        _ => false,
    }
}
