//! QEMU's command line, as the user typed it, and as the agent needs it.
//!
//! Only the options that the agent has to know or change are parsed. Everything
//! else is kept verbatim, for QEMU to judge.

mod exclusive;
mod free_page_hint;
mod guest_port;
mod hand_over;
mod inherited;
mod legacy_ack;
mod machine;
mod mapped_ram;
mod options;
mod overrides;
mod running;
mod taps;
mod user;
mod vnc;

use std::os::fd::RawFd;

pub use exclusive::Exclusive;
pub(crate) use guest_port::{GUEST_ID, value};
pub(crate) use hand_over::{IN_DIRECTORY, RamFile, without_numbers};
pub(crate) use inherited::{Address, Listening, name_after, name_until, with_addresses};
pub(crate) use legacy_ack::{LEGACY_ACK, MIGRATION, legacy_ack};
pub use machine::Backend;
pub(crate) use machine::pieces;
pub(crate) use mapped_ram::SharedFile;
pub use overrides::{apply_overrides, check_overrides, overridden, parse_override};
pub use taps::Tap;
pub(crate) use taps::{OpenTap, PassedTap, with_tap_names};
pub(crate) use vnc::{vnc_display, vnc_sockets, with_vnc_address};

/// The id of the agent's own QMP connection.
const QMP_ID: &str = "droveway-qmp";

/// Why a command line can't be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommandLineError {
    /// It is empty.
    #[error("the command line is empty: give QEMU's program and its arguments")]
    Empty,
    /// The last option lacks its argument.
    #[error("{option} needs an argument")]
    MissingArgument {
        /// The option as typed.
        option: String,
    },
    /// An option that the agent can't work with.
    #[error("{option} can't be used here: {reason}")]
    Unsupported {
        /// The option as typed.
        option: String,
        /// Why not.
        reason: &'static str,
    },
    /// The VM has a balloon already, and QEMU makes only one.
    #[error(
        "the VM already has a balloon: give that balloon free-page-hint=on and an iothread instead \
         of --free-page-hint"
    )]
    Balloon,
    /// RAM that can't be handed over to another QEMU.
    #[error("--hand-over: {option} {reason}")]
    NotHandedOver {
        /// The option that has to change.
        option: String,
        /// Why.
        reason: &'static str,
    },
    /// `--set` that is not `OLD=NEW`.
    #[error("--set {text}: write it as OLD=NEW")]
    BadOverride {
        /// What was typed.
        text: String,
    },
    /// `--set` that changes nothing.
    #[error("--set: `{old}` occurs nowhere in the VM's command line")]
    OverrideUnused {
        /// The text that was looked for.
        old: String,
    },
    /// More `--set` than can be applied.
    #[error(
        "--set: {count} replacements with {bytes} bytes are too many: give {count_max} with \
         {bytes_max} bytes at most"
    )]
    OverridesTooLarge {
        /// How many there are.
        count: usize,
        /// Their bytes.
        bytes: usize,
        /// The most replacements.
        count_max: usize,
        /// The most bytes of all of them.
        bytes_max: usize,
    },
    /// A command line, or a part of one, with which no program can be started.
    #[error(
        "with its replacements (--set) the command line has {value} {what}, and can have {max} at \
         most: shorten it"
    )]
    TooLong {
        /// What there is too much of.
        what: &'static str,
        /// How much of it there is.
        value: usize,
        /// The limit.
        max: usize,
    },
}

/// One piece of a command line.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Item {
    /// An option: as typed, its name, and its argument.
    Option { typed: String, name: String, argument: Option<String> },
    /// A word by itself: a disk image.
    Word(String),
}

/// QEMU's command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandLine {
    program: String,
    items: Vec<Item>,
}

impl CommandLine {
    /// Parses what the user typed.
    ///
    /// # Errors
    /// If an argument is missing, or an option is not allowed under the agent.
    pub fn parse<S: AsRef<str>>(argv: &[S]) -> Result<Self, CommandLineError> {
        let mut words = argv.iter().map(AsRef::as_ref);
        let program =
            words.next().filter(|word| !word.is_empty()).ok_or(CommandLineError::Empty)?;
        let mut items = Vec::new();
        while let Some(word) = words.next() {
            let Some(name) = options::name(word) else {
                items.push(Item::Word(word.to_owned()));
                continue;
            };
            if let Some(reason) = options::refused(name) {
                return Err(CommandLineError::Unsupported { option: word.to_owned(), reason });
            }
            let argument = if options::takes_argument(name) {
                let missing = || CommandLineError::MissingArgument { option: word.to_owned() };
                Some(words.next().ok_or_else(missing)?.to_owned())
            } else {
                None
            };
            items.push(Item::Option { typed: word.to_owned(), name: name.to_owned(), argument });
        }
        let line = Self { program: program.to_owned(), items };
        let ours = format!("id={QMP_ID}");
        if line.arguments("chardev").any(|argument| has_part(argument, &ours)) {
            return Err(CommandLineError::Unsupported {
                option: format!("-chardev id={QMP_ID}"),
                reason: "that id is the agent's",
            });
        }
        Ok(line)
    }

    /// The words that QEMU gets.
    #[must_use]
    pub fn argv(&self) -> Vec<String> {
        let mut argv = vec![self.program.clone()];
        for item in &self.items {
            match item {
                Item::Option { typed, argument, .. } => {
                    argv.push(typed.clone());
                    argv.extend(argument.clone());
                }
                Item::Word(word) => argv.push(word.clone()),
            }
        }
        argv
    }

    /// QEMU's program.
    #[must_use]
    pub fn program(&self) -> &str {
        &self.program
    }

    /// Whether it has an option, by its name without dashes.
    #[must_use]
    pub fn has(&self, option: &str) -> bool {
        self.items.iter().any(|item| matches!(item, Item::Option { name, .. } if name == option))
    }

    /// The arguments of all options of this name, in order.
    pub fn arguments<'a>(&'a self, option: &'a str) -> impl Iterator<Item = &'a str> {
        self.items.iter().filter_map(move |item| match item {
            Item::Option { name, argument, .. } if name == option => argument.as_deref(),
            _ => None,
        })
    }

    /// Adds QMP for the agent at a listening socket that QEMU inherits.
    #[must_use]
    pub fn with_qmp(&self, listener: RawFd) -> Self {
        let chardev = format!("socket,id={QMP_ID},fd={listener},server=on,wait=off");
        let mon = format!("chardev={QMP_ID},mode=control");
        self.clone().and("-chardev", &chardev).and("-mon", &mon)
    }

    /// The file for QEMU's process id.
    pub(crate) fn pid_file(&self) -> Option<&str> {
        self.arguments("pidfile").last()
    }

    /// Has QEMU write its process id nowhere.
    pub(crate) fn without_pid_file(&self) -> Self {
        let mut line = self.clone();
        line.items.retain(|item| !matches!(item, Item::Option { name, .. } if name == "pidfile"));
        line
    }

    /// Makes QEMU wait, stopped, for an incoming migration, with exactly the VM's
    /// machine type, since `q35` means another one in each version of QEMU.
    #[must_use]
    pub fn waiting(&self, machine: Option<&str>) -> Self {
        let mut line = self.clone();
        // The VM arrives with its state, and must not load a snapshot.
        line.items.retain(|item| !matches!(item, Item::Option { name, .. } if name == "loadvm"));
        if let Some(machine) = machine {
            line = line.and("-machine", &format!("type={machine}"));
        }
        if !line.has("S") {
            line.items.push(option("-S", None));
        }
        line.and("-incoming", "defer")
    }

    fn and(mut self, typed: &str, argument: &str) -> Self {
        self.items.push(option(typed, Some(argument)));
        self
    }
}

fn has_part(argument: &str, part: &str) -> bool {
    argument.split(',').any(|one| one == part)
}

fn option(typed: &str, argument: Option<&str>) -> Item {
    let name = options::name(typed).unwrap_or(typed).to_owned();
    Item::Option { typed: typed.to_owned(), name, argument: argument.map(str::to_owned) }
}

#[cfg(test)]
mod tests;
