//! Connects this agent to the QEMU, or disk server, that waits here.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Component, Path};
use std::time::Duration;

use host::nic;
use qemu::commanded::Commanded;
use qemu::socket::connect_opened;
use rustix::fs::{Mode, OFlags, ResolveFlags};

use crate::ManagerError;
use crate::kubevirt::Launcher;
use crate::takeover::open_socket;

/// A listener on this very host accepts at once.
const CONNECT_MAX: Duration = Duration::from_secs(5);

/// A place to connect to, possibly several times.
pub enum Onward {
    /// A port of this host.
    Port(SocketAddr),
    /// A socket, kept open, because its path may lead to another socket the next time.
    Path(OwnedFd),
    /// The same, in a pod.
    Pod(OwnedFd, Launcher),
}

impl Onward {
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
    ///
    /// # Errors
    /// If nothing listens there any more, or it does not accept.
    pub fn connect(&self) -> Result<UnixStream, ManagerError> {
        match self {
            Self::Port(address) => {
                let stream = TcpStream::connect_timeout(address, CONNECT_MAX);
                let stream = stream.and_then(|stream| stream.set_nodelay(true).map(|()| stream));
                // A `UnixStream` works for any stream socket.
                let stream = stream.map(|stream| UnixStream::from(OwnedFd::from(stream)));
                stream.map_err(|error| unreached(address, error))
            }
            Self::Path(socket) | Self::Pod(socket, _) => {
                connect_opened(socket, CONNECT_MAX).map_err(|error| unreached("its socket", error))
            }
        }
    }

    /// Opens the first connection, and determines whose QEMU it leads to.
    ///
    /// # Errors
    /// As [`Onward::connect`].
    pub fn meet(&self) -> Result<(UnixStream, Option<Commanded>), ManagerError> {
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

/// Opens the socket at `path` if it is inside `directory` and the path has no links: its files may
/// be made by the user that QEMU runs as, and the agent may have access to more than that user.
pub(crate) fn socket_below(directory: &Path, path: &Path) -> Result<OwnedFd, ManagerError> {
    let outside = || {
        ManagerError::Refused(format!(
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
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::open(directory, flags, Mode::empty()).map_err(io::Error::from);
    let socket = root.and_then(|root| open_socket(root, inside, ResolveFlags::BENEATH));
    socket.map_err(|error| unreached(path.display(), error))
}

fn unreached(what: impl std::fmt::Display, source: io::Error) -> ManagerError {
    ManagerError::Connect { what: what.to_string(), source }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    fn refusal(directory: &Path, path: &str) -> String {
        let Err(why) = socket_below(directory, Path::new(path)) else {
            panic!("{path} is not refused")
        };
        why.to_string()
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
}
