//! Connects this agent to the QEMU, or disk server, that waits here.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Component, Path};
use std::time::Duration;

use managers::kubevirt::{Launcher, Made, Node, Port, SocketName, Vmi};
use managers::takeover;
use qemu::commanded::Commanded;
use qemu::socket::connect_opened;
use rustix::fs::{FileType, Mode, OFlags, ResolveFlags};
use wire::carry::Target;

use super::super::End;
use crate::host::Carrying;

/// A listener on this very host accepts at once.
const CONNECT_MAX: Duration = Duration::from_secs(5);

/// A place to connect to, possibly several times.
pub(super) enum Onward {
    Port(SocketAddr),
    /// Kept open, because the path may lead to another socket the next time.
    Path(OwnedFd),
    /// The same, in a pod.
    Pod(OwnedFd, Launcher),
}

impl Onward {
    /// Resolves the source's target, if carried migrations may arrive there.
    pub(super) fn find(target: &Target, carrying: &Carrying) -> Result<Self, End> {
        match (target, carrying) {
            (Target::Port(port), Carrying::Host { address, ports, .. }) if ports.contains(port) => {
                Ok(Self::Port(SocketAddr::new(*address, *port)))
            }
            (Target::Port(port), Carrying::Host { ports, .. }) => Err(End::failed(format!(
                "port {port} is outside those that are carried here, {} to {}: `carry-ports` of \
                 this host in the peers file",
                ports.start(),
                ports.end()
            ))),
            (Target::Path(path), Carrying::Host { directory, .. }) => {
                socket_below(directory, Path::new(path)).map(Self::Path)
            }
            (Target::Vmi { uid, port }, Carrying::Kubevirt(node)) => in_pod(node, uid, *port),
            (Target::Path(path), Carrying::Proxmox(host)) => {
                let path = Path::new(path);
                let socket = socket_below(host.path(), path)?;
                let name = path.strip_prefix(host.path()).ok().and_then(Path::to_str);
                if !host.waits(name.unwrap_or_default()).map_err(End::failed)? {
                    let path = path.display();
                    return Err(End::failed(format!("no VM's own QEMU listens at {path}")));
                }
                Ok(Self::Path(socket))
            }
            (_, carrying) => Err(End::failed(format!(
                "the agent there carries migrations of {}: `manager` under [carry] in its file",
                match carrying {
                    Carrying::Host { .. } => "libvirt",
                    Carrying::Kubevirt(_) => "KubeVirt",
                    Carrying::Proxmox(_) => "Proxmox VE",
                }
            ))),
        }
    }

    /// The listening process, if it can be determined before connecting.
    fn listener(&self) -> Option<u32> {
        let Self::Port(address) = self else { return None };
        let found = nic::listener_at(*address);
        found
            .inspect_err(
                |error| tracing::warn!(%error, "cannot find the process that owns the port"),
            )
            .ok()
            .flatten()
    }

    /// Opens a connection.
    pub(super) fn connect(&self) -> Result<UnixStream, End> {
        let refused = |what: String| {
            move |error| {
                End::failed(format!("cannot connect to the destination's QEMU at {what}: {error}"))
            }
        };
        match self {
            Self::Port(address) => {
                let stream = TcpStream::connect_timeout(address, CONNECT_MAX);
                let stream = stream.map_err(refused(address.to_string()))?;
                stream.set_nodelay(true).map_err(End::failed)?;
                // A `UnixStream` works for any stream socket.
                Ok(UnixStream::from(OwnedFd::from(stream)))
            }
            Self::Path(socket) | Self::Pod(socket, _) => {
                connect_opened(socket, CONNECT_MAX).map_err(refused("its socket".to_owned()))
            }
        }
    }

    /// Opens the first connection, and determines whose QEMU it leads to.
    pub(super) fn meet(&self) -> Result<(UnixStream, Option<Commanded>), End> {
        let before = self.listener();
        let socket = self.connect()?;
        let pid = match self {
            Self::Port(_) => before,
            Self::Path(_) => who_listened(&socket),
            // A process of the pod may have ended, and its PID belong to another pod.
            Self::Pod(_, launcher) => who_listened(&socket).filter(|pid| launcher.runs(*pid)),
        };
        let whose = pid.and_then(|pid| {
            let whose = Commanded::of_process(pid);
            whose
                .inspect_err(|error| tracing::warn!(%error, "cannot find the VM behind the socket"))
                .ok()
        });
        Ok((socket, whose))
    }
}

/// The process that made the socket to which a connection leads.
fn who_listened(socket: &UnixStream) -> Option<u32> {
    let peer = rustix::net::sockopt::socket_peercred(socket).ok()?;
    u32::try_from(peer.pid.as_raw_nonzero().get()).ok()
}

/// Opens the socket at which a KubeVirt pod's QEMU waits for a VM.
fn in_pod(node: &Node, uid: &str, port: u16) -> Result<Onward, End> {
    let vmi: Vmi = uid.parse().map_err(End::failed)?;
    let launcher = node.launcher(&vmi).map_err(End::failed)?;
    let nothing = || End::failed(format!("no QEMU waits in the pod of the VM {vmi}"));
    let directory = launcher.directory().map_err(End::failed)?.ok_or_else(nothing)?;
    let Some(port) = Port::of(port) else {
        return Err(End::failed(format!("{port} is not one of KubeVirt's ports")));
    };
    let name = SocketName { vmi: vmi.clone(), port };
    let socket = directory.socket(&name.to_string()).map_err(End::failed)?.ok_or_else(nothing)?;
    match launcher.made(&name).map_err(End::failed)? {
        Made::Inside => Ok(Onward::Pod(socket, launcher)),
        Made::Outside => {
            Err(End::failed(format!("the VM {vmi} leaves this host, and does not arrive")))
        }
    }
}

/// Opens the socket at `path` if it is inside `directory` and the path has no links: its files may
/// be made by the user that QEMU runs as, and the agent may have access to more than that user.
fn socket_below(directory: &Path, path: &Path) -> Result<OwnedFd, End> {
    let outside = || {
        End::failed(format!(
            "{} is not inside {}, where migrations are carried: `directory` under [carry] in the \
             agent's file",
            path.display(),
            directory.display()
        ))
    };
    let inside = path.strip_prefix(directory).map_err(|_| outside())?;
    if inside.components().next().is_none()
        || !inside.components().all(|part| matches!(part, Component::Normal(_)))
    {
        return Err(outside());
    }
    let refused = |error: io::Error| {
        End::failed(format!(
            "cannot connect to the destination's QEMU at {}: {error}",
            path.display()
        ))
    };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::open(directory, flags, Mode::empty());
    let root = root.map_err(|error| refused(error.into()))?;
    let flags = OFlags::PATH | OFlags::NOFOLLOW;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let socket = takeover::open_resolved(&root, inside, flags, resolve).map_err(refused)?;
    let stat = rustix::fs::fstat(&socket).map_err(|error| refused(error.into()))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Socket {
        return Err(End::failed(format!("{} is not a socket", path.display())));
    }
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    fn refusal(directory: &Path, path: &str) -> String {
        match socket_below(directory, Path::new(path)) {
            Err(End::Failed(why)) => why,
            _ => panic!("{path} is not refused"),
        }
    }

    #[test]
    fn only_sockets_inside_are_connected_to() {
        let dir = tempfile::tempdir().unwrap();
        let (inside, outside) = (dir.path().join("in"), dir.path().join("out.sock"));
        std::fs::create_dir(&inside).unwrap();
        let listener = UnixListener::bind(inside.join("vm.sock")).unwrap();
        let _other = UnixListener::bind(&outside).unwrap();
        std::os::unix::fs::symlink(&outside, inside.join("link.sock")).unwrap();
        std::os::unix::fs::symlink(dir.path(), inside.join("dir")).unwrap();
        std::fs::write(inside.join("file"), "").unwrap();
        let text = |name: &str| inside.join(name).display().to_string();
        let socket = socket_below(&inside, Path::new(&text("vm.sock"))).ok().unwrap();
        let (_stream, whose) = Onward::Path(socket).meet().ok().unwrap();
        assert_eq!(whose.unwrap().process.pid(), std::process::id());
        drop(listener.accept().unwrap());
        for path in [text("../out.sock"), outside.display().to_string(), text(""), "vm".to_owned()]
        {
            assert!(refusal(&inside, &path).contains("not inside"), "{path}");
        }
        for name in ["dir/out.sock", "gone.sock"] {
            assert!(refusal(&inside, &text(name)).contains("cannot connect to"), "{name}");
        }
        // The link itself is opened, not its target.
        for name in ["file", "link.sock"] {
            assert!(refusal(&inside, &text(name)).contains("not a socket"), "{name}");
        }
    }

    #[test]
    fn only_permitted_targets_are_connected_to() {
        let carrying = Carrying::Host {
            address: "127.0.0.1".parse().unwrap(),
            ports: 49152..=49215,
            directory: "/run/droveway/migrate".into(),
        };
        let none = tempfile::tempdir().unwrap();
        let kubevirt = Carrying::Kubevirt(Node::with_records(none.path()));
        let proxmox = Carrying::Proxmox(managers::proxmox::Host::new(none.path()));
        let socket = |name: &str| none.path().join(name).display().to_string();
        let _other = UnixListener::bind(socket("other")).unwrap();
        let vmi = |uid: &str| Target::Vmi { uid: uid.to_owned(), port: 49152 };
        for (target, carrying, part) in [
            (Target::Port(22), &carrying, "49152 to 49215"),
            (vmi("8a9c-1"), &carrying, "migrations of libvirt"),
            (vmi("8a9c-1"), &kubevirt, "no pod of this node"),
            (vmi("../8a9c"), &kubevirt, "no UID"),
            (Target::Port(49160), &kubevirt, "migrations of KubeVirt"),
            (Target::Path("/run/x".to_owned()), &kubevirt, "migrations of KubeVirt"),
            (Target::Port(49160), &proxmox, "migrations of Proxmox VE"),
            (Target::Path("/run/x".to_owned()), &proxmox, "not inside"),
            (Target::Path(socket("100.migrate")), &proxmox, "cannot connect to"),
            (Target::Path(socket("other")), &proxmox, "no VM's own QEMU"),
        ] {
            let Err(End::Failed(why)) = Onward::find(&target, carrying) else { panic!() };
            assert!(why.contains(part), "{target:?}: {why}");
        }
        let found = Onward::find(&Target::Port(49160), &carrying).ok().unwrap();
        assert!(matches!(found, Onward::Port(at) if at.port() == 49160));
    }
}
