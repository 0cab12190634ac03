//! What a VM's next QEMU on the same host gets from the former one, because two can't have it.
//!
//! Two QEMUs can't listen at the same path: the second one would remove the first one's socket. So
//! the next one inherits the open socket. And a file for the guest's output is continued, where a
//! QEMU that starts would empty it.

use std::os::fd::RawFd;

use super::guest_port::value;
use super::machine::pieces;
use super::{CommandLine, Item, option};

/// What stands for where a socket listens, and how it begins.
const REPLACED: [&str; 5] = ["path", "server", "wait", "nowait", "fd"];
/// Of a socket that speaks a protocol, is no file, or has a log that each QEMU empties.
const SPECIAL: [&str; 9] =
    ["abstract", "tight", "telnet", "tn3270", "websocket", "tls-creds", "logfile", "host", "fd"];
/// Options that use a character device for something else than a port of the guest.
const OTHER_USERS: [&str; 7] = ["mon", "object", "netdev", "nic", "net", "tpmdev", "fsdev"];
/// Options for programs that command QEMU, or the guest's vCPUs: they must not reach the next QEMU
/// before it has the VM.
const COMMANDING: [&str; 4] = ["monitor", "qmp", "qmp-pretty", "gdb"];
/// Options with the guest's output, which have a short form.
const OUTPUTS: [&str; 3] = ["serial", "parallel", DEBUGCON];
/// QEMU gives that device the character device of this id, whatever the option names.
const DEBUGCON: &str = "debugcon";
/// How devices begin whose back end is at the other end of a socket.
const SERVED: [&str; 2] = ["vhost-user", "ivshmem"];

impl CommandLine {
    /// The paths of sockets that the next QEMU inherits, in order: those at which ports of the
    /// guest listen.
    #[must_use]
    pub fn inherited_sockets(&self) -> Vec<String> {
        self.items.iter().filter_map(|item| self.inherited_socket(item)).collect()
    }

    /// The path at which an option listens, if the next QEMU inherits its socket.
    pub(super) fn inherited_socket(&self, item: &Item) -> Option<String> {
        let Item::Option { name, argument: Some(argument), .. } = item else { return None };
        let path = listens_at(argument).filter(|_| name == "chardev")?;
        let id = value(argument, "id")?;
        (!self.is_used_otherwise(&id)).then_some(path)
    }

    /// Whether a character device may be more than a port of the guest.
    fn is_used_otherwise(&self, id: &str) -> bool {
        let quoted = format!("\"{id}\"");
        let is_it = |piece: &String| key(piece) != "id" && piece.rsplit('=').next() == Some(id);
        let has = |argument: &str| pieces(argument).iter().any(is_it) || argument.contains(&quoted);
        let ends = |argument: &str| argument.rsplit(':').next() == Some(id);
        let served = |device: &str| {
            let kind = value(device, "driver").unwrap_or_default();
            SERVED.iter().any(|start| kind.starts_with(start)) && has(device)
        };
        OTHER_USERS.iter().any(|option| self.arguments(option).any(has))
            || COMMANDING.iter().any(|option| self.arguments(option).any(ends))
            || OUTPUTS.iter().any(|option| self.arguments(option).any(|one| is_mixed(one, id)))
            || self.arguments("device").any(served)
    }

    /// Puts in the numbers of these sockets, as QEMU inherits them.
    pub(crate) fn with_inherited_sockets(&self, sockets: &[RawFd]) -> Self {
        let mut line = self.clone();
        let mut sockets = sockets.iter();
        for item in &mut line.items {
            if self.inherited_socket(item).is_some()
                && let Item::Option { argument: Some(argument), .. } = item
                && let Some(socket) = sockets.next()
            {
                let kept = pieces(argument);
                let kept = kept.iter().filter(|piece| !REPLACED.contains(&key(piece)));
                let mut words: Vec<String> = kept.map(|piece| piece.replace(',', ",,")).collect();
                words.push(format!("fd={socket},server=on,wait=off"));
                *argument = words.join(",");
            }
        }
        line
    }

    /// Has files with the guest's output continued.
    pub(crate) fn appending(&self) -> Self {
        let mut line = Self { program: self.program.clone(), items: Vec::new() };
        for item in &self.items {
            let (Item::Option { typed, name, argument: Some(argument) }, at) =
                (item, line.items.len())
            else {
                line.items.push(item.clone());
                continue;
            };
            let short = argument.strip_prefix("file:").filter(|_| OUTPUTS.contains(&&**name));
            if let Some(path) = short {
                // The short form has no option for it.
                let id = match name.as_str() {
                    DEBUGCON => DEBUGCON.to_owned(),
                    _ => format!("droveway-file{at}"),
                };
                let path = path.replace(',', ",,");
                let chardev = format!("file,id={id},path={path},append=on");
                line.items.push(option("-chardev", Some(&chardev)));
                line.items.push(option(typed, Some(&format!("chardev:{id}"))));
            } else if name == "chardev" && empties(argument) {
                line.items.push(option(typed, Some(&format!("{argument},append=on"))));
            } else {
                line.items.push(item.clone());
            }
        }
        line
    }
}

/// The command line of a running QEMU of the agent with paths in place of the numbers of sockets
/// that it inherited. `path` is where its open file of that number listens.
pub(crate) fn with_paths(argv: Vec<String>, path: impl Fn(RawFd) -> Option<String>) -> Vec<String> {
    let named = |word: &str| {
        let pieces = pieces(word);
        if pieces.first()? != "socket" || value(word, "id")?.starts_with("droveway-") {
            return None;
        }
        let path = path(value(word, "fd")?.parse().ok()?)?;
        let fd = pieces.iter().position(|piece| key(piece) == "fd")?;
        let mut words: Vec<String> = pieces.iter().map(|piece| piece.replace(',', ",,")).collect();
        words[fd] = format!("path={}", path.replace(',', ",,"));
        Some(words.join(","))
    };
    argv.into_iter().map(|word| named(&word).unwrap_or(word)).collect()
}

/// The path at which a character device listens as a plain unix socket.
fn listens_at(argument: &str) -> Option<String> {
    let pieces = pieces(argument);
    let is_on = |piece: &String| matches!(piece.as_str(), "server" | "server=on" | "server=true");
    let is_plain = !pieces.iter().any(|piece| SPECIAL.contains(&key(piece)));
    let listens = pieces.first()? == "socket" && is_plain && pieces.iter().any(is_on);
    value(argument, "path").filter(|path| listens && !path.is_empty())
}

/// Whether a port of the guest shares its device with the monitor.
fn is_mixed(argument: &str, id: &str) -> bool {
    argument.strip_prefix("mon:").is_some_and(|device| device.rsplit(':').next() == Some(id))
}

/// Whether a character device empties its file when QEMU starts.
fn empties(argument: &str) -> bool {
    let pieces = pieces(argument);
    pieces.first().is_some_and(|kind| kind == "file")
        && !pieces.iter().any(|piece| key(piece) == "append")
}

/// The name of a property in a piece of an argument.
fn key(piece: &str) -> &str {
    piece.split('=').next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> CommandLine {
        CommandLine::parse(&line.split_whitespace().collect::<Vec<_>>()).unwrap()
    }

    fn arguments(line: &CommandLine) -> String {
        line.argv()[1..].join(" ")
    }

    #[test]
    fn ports_of_the_guest_keep_their_sockets() {
        let line = parse(
            "qemu -chardev socket,id=talk,path=/run/a,,b,server=on,wait=off -serial chardev:talk \
             -chardev null,id=n -chardev socket,path=q.sock,server,nowait,id=agent,mux=off \
             -device virtserialport,chardev=agent,name=org.qemu.guest_agent.0",
        );
        assert_eq!(line.inherited_sockets(), ["/run/a,b", "q.sock"]);
        let expected = "-chardev socket,id=talk,fd=7,server=on,wait=off -serial chardev:talk \
                        -chardev null,id=n -chardev socket,id=agent,mux=off,fd=9,server=on,\
                        wait=off -device virtserialport,chardev=agent,\
                        name=org.qemu.guest_agent.0";
        assert_eq!(arguments(&line.with_inherited_sockets(&[7, 9])), expected);
        assert_eq!(line.exclusive(), []);
    }

    #[test]
    fn what_commands_qemu_or_serves_it_is_not_inherited() {
        let socket = "qemu -chardev socket,id=c,path=/s,server=on,wait=off";
        for more in [
            "-mon chardev=c,mode=control",
            "-mon c",
            "-qmp chardev:c",
            "-gdb chardev:c",
            "-serial mon:chardev:c",
            "-netdev vhost-user,id=n,chardev=c",
            "-object filter-mirror,id=f,netdev=n,outdev=c,queue=tx",
            "-object {\"qom-type\":\"rng-egd\",\"chardev\":\"c\"}",
            "-device vhost-user-fs-pci,chardev=c,tag=t",
            "-tpmdev emulator,id=t,chardev=c",
        ] {
            let line = parse(&format!("{socket} {more}"));
            assert_eq!(line.inherited_sockets(), [""; 0], "{more}");
            assert!(!line.exclusive().is_empty(), "{more}");
        }
        for other in [
            "socket,id=c,path=/s",
            "socket,id=c,path=/s,server=off",
            "socket,id=c,path=/s,server=on,websocket=on",
            "socket,id=c,path=s,server=on,abstract=on",
            "socket,id=c,host=0.0.0.0,port=1,server=on",
            "socket,id=c,fd=7,server=on",
            "socket,path=/s,server=on",
            "pty,id=c",
        ] {
            assert_eq!(parse(&format!("qemu -chardev {other}")).inherited_sockets(), [""; 0]);
        }
    }

    #[test]
    fn a_running_qemus_sockets_have_paths_again() {
        let line = parse("qemu -chardev socket,id=talk,path=/a,,b,server=on -serial chardev:talk");
        let started = line.with_inherited_sockets(&[7]).with_qmp(9);
        let path = |number: RawFd| (number == 7 || number == 9).then(|| "/a,b".to_owned());
        let restored = with_paths(started.argv(), path);
        assert!(restored[2].starts_with("socket,id=talk,path=/a,,b,server=on"), "{restored:?}");
        assert!(restored.iter().any(|word| word.contains("droveway-qmp,fd=9")), "{restored:?}");
        assert_eq!(with_paths(started.argv(), |_| None), started.argv());
    }

    #[test]
    fn the_guests_output_is_continued() {
        let line = parse(
            "qemu -serial file:/run/c,1 -chardev file,id=a,path=/a -chardev \
             file,id=b,path=/b,append=off -debugcon file:/d -parallel stdio",
        );
        let expected = "-chardev file,id=droveway-file0,path=/run/c,,1,append=on \
                        -serial chardev:droveway-file0 -chardev file,id=a,path=/a,append=on \
                        -chardev file,id=b,path=/b,append=off \
                        -chardev file,id=debugcon,path=/d,append=on -debugcon chardev:debugcon \
                        -parallel stdio";
        assert_eq!(arguments(&line.appending()), expected);
        assert_eq!(line.appending().appending(), line.appending(), "once is enough");
    }
}
