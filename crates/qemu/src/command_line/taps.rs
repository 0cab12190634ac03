//! The tap devices that a command line names.
//!
//! QEMU makes one that doesn't exist, if it may, and only a script puts that on a bridge.

use super::CommandLine;
use super::guest_port::value;
use super::machine::pieces;

/// What QEMU runs for a tap unless an option says otherwise.
const SCRIPT: &str = "/etc/qemu-ifup";
/// Options for the host's side of a network card.
const OPTIONS: [&str; 3] = ["netdev", "nic", "net"];

/// A tap device that a network card of the VM uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tap {
    /// Its name.
    pub name: String,
    /// The program that QEMU runs to connect it; `None`: it has to be connected.
    pub script: Option<String>,
}

impl CommandLine {
    /// Its tap devices, as far as it names them: those that QEMU gets as open files, and those
    /// whose names the kernel chooses, are others' concern.
    #[must_use]
    pub fn taps(&self) -> Vec<Tap> {
        OPTIONS.iter().flat_map(|option| self.arguments(option)).filter_map(tap).collect()
    }
}

fn tap(argument: &str) -> Option<Tap> {
    let kind = value(argument, "type").or_else(|| pieces(argument).into_iter().next())?;
    let name = value(argument, "ifname").filter(|name| !name.is_empty() && !name.contains('%'))?;
    if kind != "tap" {
        return None;
    }
    let script = value(argument, "script").unwrap_or_else(|| SCRIPT.to_owned());
    let connects = !script.is_empty() && script != "no";
    Some(Tap { name, script: connects.then_some(script) })
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
}
