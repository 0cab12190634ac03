//! The tap devices that a command line names.
//!
//! QEMU makes one that doesn't exist, if it may, and only a script puts that on a bridge.
//!
//! A VM's next QEMU on the same host gets open files in place of a tap's name: the device is its
//! former one's until that one has ended.

use std::os::fd::RawFd;

use serde_json::Value;

use super::guest_port::value;
use super::machine::{pieces, with_properties};
use super::{CommandLine, Item};

/// What QEMU runs for a tap unless an option says otherwise.
const SCRIPT: &str = "/etc/qemu-ifup";
/// What it runs when it ends.
const DOWN_SCRIPT: &str = "/etc/qemu-ifdown";
/// Options for the host's side of a network card.
const OPTIONS: [&str; 3] = ["netdev", "nic", "net"];
/// What names a tap or sets it up, and is invalid with open files.
const REPLACED: [&str; 6] = ["ifname", "script", "downscript", "vnet_hdr", "queues", "br"];
/// Open files, and a program that opens one.
const OPEN: [&str; 5] = ["fd", "fds", "vhostfd", "vhostfds", "helper"];
/// The most queues of one tap.
const QUEUES_MAX: usize = 256;

/// A tap device that a network card of the VM uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tap {
    /// Its name.
    pub name: String,
    /// The program that QEMU runs to connect it; `None`: it has to be connected.
    pub script: Option<String>,
}

/// A tap of which the next QEMU on the same host gets open files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PassedTap {
    /// Its name.
    pub(crate) name: String,
    /// How many queues it has.
    pub(crate) queues: usize,
    /// The program that QEMU runs when it ends, unless it gets open files.
    pub(crate) down_script: Option<String>,
}

/// What a running QEMU has in place of a tap's name and set-up.
pub(crate) struct OpenTap {
    /// The tap's name.
    pub(crate) name: String,
    /// Whether packets have virtio's header in front.
    pub(crate) virtio_header: bool,
}

impl CommandLine {
    /// Its taps of which the next QEMU gets open files, in order.
    pub(crate) fn passed_taps(&self) -> Vec<PassedTap> {
        self.items.iter().filter_map(passed_in).collect()
    }

    /// Puts in the numbers of these files, as QEMU inherits them: one for each queue.
    pub(crate) fn with_tap_files(&self, files: &[Vec<RawFd>]) -> Self {
        let mut line = self.clone();
        let mut files = files.iter();
        for item in &mut line.items {
            if passed_in(item).is_some()
                && let Item::Option { argument: Some(argument), .. } = item
                && let Some(numbers) = files.next()
            {
                *argument = with_files(argument, numbers);
            }
        }
        line
    }

    /// The numbers of the open files that a running QEMU has for its taps, in order.
    pub(crate) fn tap_files(&self) -> Vec<Vec<RawFd>> {
        let network = |item: &Item| match item {
            Item::Option { name, argument: Some(argument), .. }
                if OPTIONS.contains(&&**name) && is_tap(argument) =>
            {
                numbers(argument)
            }
            _ => None,
        };
        self.items.iter().filter_map(network).collect()
    }

    /// Its tap devices, as far as it names them: those that QEMU gets as open files, and those
    /// whose names the kernel chooses, are others' concern.
    #[must_use]
    pub fn taps(&self) -> Vec<Tap> {
        OPTIONS.iter().flat_map(|option| self.arguments(option)).filter_map(tap).collect()
    }
}

/// The command line of a running QEMU of the agent with names in place of the numbers of open files
/// that it got for taps. `tap` is the tap of its open file of that number.
pub(crate) fn with_tap_names(
    argv: Vec<String>,
    tap: impl Fn(RawFd) -> Option<OpenTap>,
) -> Vec<String> {
    let named = |word: &str| {
        let files = if is_tap(word) { numbers(word)? } else { return None };
        Some(with_name(word, &tap(*files.first()?)?, files.len()))
    };
    argv.into_iter().map(|word| named(&word).unwrap_or(word)).collect()
}

fn tap(argument: &str) -> Option<Tap> {
    let name = value(argument, "ifname").filter(|name| !name.is_empty() && !name.contains('%'))?;
    if !is_tap(argument) {
        return None;
    }
    Some(Tap { name, script: script(argument, "script", SCRIPT) })
}

fn is_tap(argument: &str) -> bool {
    let kind = value(argument, "type").or_else(|| pieces(argument).into_iter().next());
    kind.is_some_and(|kind| kind == "tap")
}

/// The program that QEMU runs.
fn script(argument: &str, option: &str, default: &str) -> Option<String> {
    let script = value(argument, option).unwrap_or_else(|| default.to_owned());
    (!script.is_empty() && script != "no").then_some(script)
}

/// The tap of an option of which the next QEMU gets open files.
pub(super) fn passed_in(item: &Item) -> Option<PassedTap> {
    let Item::Option { name, argument: Some(argument), .. } = item else { return None };
    if !OPTIONS.contains(&&**name) || OPEN.iter().any(|key| value(argument, key).is_some()) {
        return None;
    }
    let name = tap(argument)?.name;
    let queues: Option<usize> =
        value(argument, "queues").map_or(Some(1), |queues| queues.parse().ok());
    let queues = queues.filter(|queues| (1..=QUEUES_MAX).contains(queues))?;
    Some(PassedTap { name, queues, down_script: script(argument, "downscript", DOWN_SCRIPT) })
}

/// The numbers of a tap's open files.
fn numbers(argument: &str) -> Option<Vec<RawFd>> {
    let files = value(argument, "fds").or_else(|| value(argument, "fd"))?;
    files.split(':').map(|number| number.parse().ok()).collect()
}

fn with_files(argument: &str, numbers: &[RawFd]) -> String {
    let key = if numbers.len() == 1 { "fd" } else { "fds" };
    let numbers: Vec<String> = numbers.iter().map(ToString::to_string).collect();
    with_properties(argument, &REPLACED, &[(key, numbers.join(":").into())])
}

fn with_name(argument: &str, tap: &OpenTap, queues: usize) -> String {
    let mut put: Vec<(&str, Value)> = vec![
        ("ifname", tap.name.clone().into()),
        ("script", "no".into()),
        ("downscript", "no".into()),
    ];
    if queues > 1 {
        put.push(("queues", queues.into()));
    }
    if !tap.virtio_header {
        put.push(("vnet_hdr", false.into()));
    }
    with_properties(argument, &OPEN, &put)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn taps_are_found_in_each_way_of_writing() {
        let tap = |name: &str, script: Option<&str>| Tap {
            name: name.to_owned(),
            script: script.map(str::to_owned),
        };
        for (line, expected) in [
            ("-netdev tap,id=n,ifname=t0,script=no,downscript=no", vec![tap("t0", None)]),
            ("-netdev tap,id=n,ifname=t0,script=", vec![tap("t0", None)]),
            ("-netdev tap,id=n,ifname=t0", vec![tap("t0", Some("/etc/qemu-ifup"))]),
            ("-netdev type=tap,id=n,ifname=t0,script=/up", vec![tap("t0", Some("/up"))]),
            (
                r#"-netdev {"type":"tap","id":"n","ifname":"t0","script":"no"}"#,
                vec![tap("t0", None)],
            ),
            ("-nic tap,model=e1000,ifname=t0,script=no", vec![tap("t0", None)]),
            ("-net nic -net tap,ifname=t0,script=no", vec![tap("t0", None)]),
            (
                "-netdev tap,id=a,ifname=t0,script=no --netdev tap,id=b,ifname=t1,script=no",
                vec![tap("t0", None), tap("t1", None)],
            ),
            ("-netdev tap,id=n,fd=7 -netdev tap,id=m,ifname=t%d -netdev tap,id=o", vec![]),
            ("-netdev bridge,id=n,br=br0 -netdev user,id=m -nic none", vec![]),
        ] {
            let words: Vec<&str> = std::iter::once("qemu").chain(line.split(' ')).collect();
            assert_eq!(CommandLine::parse(&words).unwrap().taps(), expected, "{line}");
        }
    }

    fn parse(line: &str) -> CommandLine {
        CommandLine::parse(&line.split(' ').collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn the_next_qemu_gets_open_files_in_place_of_names() {
        let line = parse(
            "qemu -netdev tap,id=a,ifname=t0,script=no,downscript=no,vhost=on,sndbuf=0 -netdev \
             user,id=u -nic tap,model=e1000,ifname=t1,script=/up,vnet_hdr=off -netdev \
             {\"type\":\"tap\",\"id\":\"b\",\"ifname\":\"t2\",\"queues\":2,\"vhost\":true} -netdev \
             tap,ifname=t3,id=c,",
        );
        let tap = |name: &str, queues: usize, down_script: Option<&str>| PassedTap {
            name: name.to_owned(),
            queues,
            down_script: down_script.map(str::to_owned),
        };
        let default = Some("/etc/qemu-ifdown");
        let expected = [
            tap("t0", 1, None),
            tap("t1", 1, default),
            tap("t2", 2, default),
            tap("t3", 1, default),
        ];
        assert_eq!(line.passed_taps(), expected);
        assert_eq!(line.exclusive(), []);
        let files = [vec![7], vec![8], vec![9, 10], vec![11]];
        let started = line.with_tap_files(&files);
        let expected = "-netdev tap,id=a,vhost=on,sndbuf=0,fd=7 -netdev user,id=u -nic \
                        tap,model=e1000,fd=8 -netdev \
                        {\"fds\":\"9:10\",\"id\":\"b\",\"type\":\"tap\",\"vhost\":true} -netdev \
                        tap,id=c,fd=11";
        assert_eq!(started.argv()[1..].join(" "), expected);
        assert_eq!(started.tap_files(), files);
        assert_eq!(started.passed_taps(), []);
        assert_eq!(line.tap_files(), [[0; 0]; 0]);
    }

    #[test]
    fn what_has_no_name_or_open_files_of_its_own_is_not_passed() {
        for network in [
            "tap,id=n",
            "tap,id=n,ifname=t%d",
            "tap,id=n,fd=7",
            "tap,id=n,ifname=t0,vhostfd=7",
            "tap,id=n,ifname=t0,helper=/h",
            "tap,id=n,ifname=t0,queues=0",
            "tap,id=n,ifname=t0,queues=many",
            "bridge,id=n,br=br0",
            "vhost-user,id=n,chardev=c,ifname=t0",
        ] {
            let line = parse(&format!("qemu -netdev {network}"));
            assert_eq!(line.passed_taps(), [], "{network}");
            assert!(!line.exclusive().is_empty(), "{network}");
            assert_eq!(line.with_tap_files(&[vec![9]]), line, "{network}");
        }
    }

    #[test]
    fn a_running_qemus_taps_have_names_again() {
        let line = parse(
            "qemu -netdev tap,id=a,ifname=t0,script=no,downscript=no,vhost=on -nic \
             tap,ifname=t1,queues=2,script=no,downscript=no,vnet_hdr=off -chardev socket,id=c,fd=7",
        );
        let started = line.with_tap_files(&[vec![7], vec![8, 9]]);
        let open = |number: RawFd| match number {
            7 => Some(OpenTap { name: "t0".to_owned(), virtio_header: true }),
            8 => Some(OpenTap { name: "t1".to_owned(), virtio_header: false }),
            _ => None,
        };
        let restored = with_tap_names(started.argv(), open);
        let expected = "-netdev tap,id=a,vhost=on,ifname=t0,script=no,downscript=no -nic \
                        tap,ifname=t1,script=no,downscript=no,queues=2,vnet_hdr=off -chardev \
                        socket,id=c,fd=7";
        assert_eq!(restored[1..].join(" "), expected);
        assert_eq!(with_tap_names(started.argv(), |_| None), started.argv());
    }
}
