//! One listener: an address to connect to, and the host that it stands for.

use std::fs;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use host::nic::{self, NicError};
use managers::kubevirt::Port;
use managers::takeover::Replaced;
use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, OFlags, Uid};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use socket2::SockRef;
use wire::carry::Target;

/// Roughly how much the kernel buffers of a connection from QEMU: as much as for a unix socket.
///
/// QEMU counts bytes that it has written as sent, and stops the VM once it could send the rest at
/// that rate within the downtime limit. By default the kernel buffers 6 MiB and more for each
/// multifd channel, sometimes much of it at once. QEMU then measures a wrong rate, and the VM is
/// stopped for seconds.
const UNREAD_BYTES: usize = 208 << 10;
/// The segment size of a network.
///
/// QEMU's side of the connection buffers some hundred segments, and those of loopback are large.
const SEGMENT_BYTES: u32 = 1448;

/// The backlog of connections: as many as a QEMU may have channels.
const UNACCEPTED_MAX: i32 = 256;

/// The users that may connect.
#[derive(Clone, Debug)]
pub(super) struct Admitted {
    /// The users that QEMUs run as; root may always connect.
    pub(super) qemu: Vec<u32>,
}

impl Admitted {
    fn has(&self, uid: u32) -> bool {
        uid == 0 || self.qemu.contains(&uid)
    }
}

/// An address to connect to.
#[derive(Clone, Debug)]
pub(super) enum Address {
    Port(SocketAddr),
    Path(PathBuf),
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Port(address) => write!(f, "{address}"),
            Self::Path(path) => write!(f, "{}", path.display()),
        }
    }
}

/// An address at which this agent stands for another host.
#[derive(Debug)]
pub(super) struct Listener {
    /// The host.
    pub(super) peer: String,
    socket: Socket,
}

#[derive(Debug)]
enum Socket {
    Port(TcpListener, SocketAddr),
    Path(UnixListener, SocketFile),
    /// Replaces another program's socket, which leads to that target.
    Replaced(Replaced, Target),
}

/// A socket's file, which is removed when this is dropped.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    /// The file itself, to tell it from another at the same path.
    file: OwnedFd,
}

impl SocketFile {
    /// Opens the socket that was just bound at `path`.
    fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::open(path, flags, Mode::empty())?;
        if FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode) != FileType::Socket {
            return Err(io::Error::other("another file has replaced the socket"));
        }
        Ok(Self { path: path.to_owned(), file })
    }

    fn give_to(&self, (uid, gid): (u32, u32)) -> io::Result<()> {
        let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
        Ok(rustix::fs::chownat(&self.file, "", Some(uid), Some(gid), AtFlags::EMPTY_PATH)?)
    }

    fn is_there(&self) -> bool {
        let which = |stat: rustix::fs::Stat| (stat.st_dev, stat.st_ino);
        let there = rustix::fs::statat(CWD, &self.path, AtFlags::SYMLINK_NOFOLLOW).map(which);
        there.is_ok_and(|there| rustix::fs::fstat(&self.file).map(which) == Ok(there))
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        // A QEMU of this host, or a listener for a host that has returned, may have replaced it.
        if self.is_there() {
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl Listener {
    /// Opens a listener at an address; its socket belongs to `owner`, the user of QEMUs.
    pub(super) fn open(
        peer: &str,
        address: &Address,
        owner: Option<(u32, u32)>,
    ) -> io::Result<Self> {
        match address {
            Address::Port(address) => Self::at_port(peer, *address),
            Address::Path(path) => Self::at_path(peer, path, owner),
        }
    }

    /// A listener that replaces another program's socket, which leads to `target`.
    pub(super) fn in_place_of(peer: &str, socket: Replaced, target: Target) -> Self {
        Self { peer: peer.to_owned(), socket: Socket::Replaced(socket, target) }
    }

    /// The socket that it replaces, if it does.
    pub(super) fn replaces(&self) -> Option<&Replaced> {
        match &self.socket {
            Socket::Replaced(socket, _) => Some(socket),
            _ => None,
        }
    }

    /// Whether a QEMU's multifd channels may come here though its main connection went to the
    /// socket that this listener replaces, just before it did.
    pub(super) fn may_miss_main(&self) -> bool {
        let memory = Port::Memory.number();
        matches!(&self.socket, Socket::Replaced(_, Target::Vmi { port, .. }) if *port == memory)
    }

    /// Whether it stands for that host at that address.
    pub(super) fn is(&self, peer: &str, address: &Address) -> bool {
        let is_there = match (&self.socket, address) {
            (Socket::Port(_, address), Address::Port(expected)) => address == expected,
            (Socket::Path(_, file), Address::Path(expected)) => file.path == *expected,
            _ => false,
        };
        is_there && self.peer == peer
    }

    /// Opens a listener at a port of a loopback address.
    fn at_port(peer: &str, address: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        // Accepted connections inherit these options.
        let socket = SockRef::from(&listener);
        socket.set_recv_buffer_size(UNREAD_BYTES)?;
        socket.set_tcp_mss(SEGMENT_BYTES)?;
        listener.set_nonblocking(true)?;
        Ok(Self { peer: peer.to_owned(), socket: Socket::Port(listener, address) })
    }

    /// Opens a listener at a socket.
    ///
    /// It belongs to the user of QEMUs, because QEMU itself makes the connections if there are
    /// several.
    fn at_path(peer: &str, path: &Path, owner: Option<(u32, u32)>) -> io::Result<Self> {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        // By file descriptor, not by path: the directory belongs to QEMU's user, who could
        // replace the file meanwhile. The file gets its mode from the socket.
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
        rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
        let file = SocketFile::open(path)?;
        if let Some(owner) = owner {
            file.give_to(owner)?;
        }
        rustix::net::listen(&socket, UNACCEPTED_MAX)?;
        let socket = Socket::Path(UnixListener::from(socket), file);
        Ok(Self { peer: peer.to_owned(), socket })
    }

    /// The next connection from an admitted user; none if none is waiting, or once `closing` is
    /// set.
    ///
    /// A call rejects at most one backlog of connections from other users, so that a user who keeps
    /// connecting occupies no thread.
    pub(super) fn take(
        &self,
        admitted: &Admitted,
        closing: &AtomicBool,
    ) -> io::Result<Option<UnixStream>> {
        let (mut connections, mut user) = (0, None);
        let taken = loop {
            if closing.load(SeqCst) || connections > UNACCEPTED_MAX {
                break Ok(None);
            }
            match self.accept() {
                Ok((stream, Some(uid))) if admitted.has(uid) => break Ok(Some(stream)),
                Ok((_, uid)) => (connections, user) = (connections + 1, uid),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break Ok(None),
                Err(error) => break Err(error),
            }
        };
        // One line for all: a user can connect thousands of times a second.
        if connections > 0 {
            let uid = user;
            tracing::warn!(
                ?uid,
                connections,
                listener = %self,
                "rejected a connection: its user has no permission"
            );
        }
        taken
    }

    /// The next connection, and its user if that is known.
    fn accept(&self) -> io::Result<(UnixStream, Option<u32>)> {
        match &self.socket {
            Socket::Port(listener, _) => {
                let (stream, from) = listener.accept()?;
                let to = stream.local_addr()?;
                let uid = nic::user_of(from, to).map_err(unknown)?;
                stream.set_nonblocking(false)?;
                stream.set_nodelay(true)?;
                // The type only has to be a stream socket; its address family does not matter.
                Ok((UnixStream::from(OwnedFd::from(stream)), uid))
            }
            Socket::Path(listener, _) => {
                let (stream, _) = listener.accept()?;
                stream.set_nonblocking(false)?;
                let uid = rustix::net::sockopt::socket_peercred(&stream)?.uid.as_raw();
                Ok((stream, Some(uid)))
            }
            // The socket's mode admits its owner and root only.
            Socket::Replaced(socket, _) => {
                let (stream, _) = socket.listener().accept()?;
                stream.set_nonblocking(false)?;
                Ok((stream, Some(0)))
            }
        }
    }

    /// Its target on the other host.
    pub(super) fn target(&self) -> Target {
        match &self.socket {
            Socket::Port(_, address) => Target::Port(address.port()),
            Socket::Path(_, file) => Target::Path(file.path.display().to_string()),
            Socket::Replaced(_, target) => target.clone(),
        }
    }

    /// Readable when a connection is waiting.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        match &self.socket {
            Socket::Port(listener, _) => listener.as_fd(),
            Socket::Path(listener, _) => listener.as_fd(),
            Socket::Replaced(socket, _) => socket.fd(),
        }
    }
}

impl std::fmt::Display for Listener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.socket {
            Socket::Port(_, address) => write!(f, "{address}"),
            Socket::Path(_, file) => write!(f, "{}", file.path.display()),
            Socket::Replaced(socket, _) => write!(f, "{}", socket.name()),
        }
    }
}

fn unknown(error: NicError) -> io::Error {
    io::Error::other(error)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpStream;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn us() -> Admitted {
        Admitted { qemu: vec![rustix::process::geteuid().as_raw()] }
    }

    fn take(listener: &Listener, admitted: &Admitted) -> Option<UnixStream> {
        listener.take(admitted, &AtomicBool::new(false)).unwrap()
    }

    /// Waits for a connection and takes it.
    fn next(listener: &Listener, admitted: &Admitted) -> Option<UnixStream> {
        rustix::event::poll(
            &mut [rustix::event::PollFd::new(&listener.fd(), rustix::event::PollFlags::IN)],
            None,
        )
        .unwrap();
        take(listener, admitted)
    }

    #[test]
    fn a_port_of_loopback_leads_to_the_same_port_there() {
        let free = TcpListener::bind("127.7.0.9:0").unwrap().local_addr().unwrap();
        let listener = Listener::at_port("b", free).unwrap();
        assert_eq!(listener.target(), Target::Port(free.port()));
        assert!(take(&listener, &us()).is_none());
        let mut client = TcpStream::connect(free).unwrap();
        let mut taken = next(&listener, &us()).unwrap();
        client.write_all(b"QEVM").unwrap();
        let mut read = [0; 4];
        taken.read_exact(&mut read).unwrap();
        assert_eq!(&read, b"QEVM");
    }

    /// How many bytes can be written before anything is read.
    fn unread(client: &mut (impl Write + AsFd)) -> usize {
        rustix::io::ioctl_fionbio(&client, true).unwrap();
        let (piece, mut bytes) = ([7; 64 << 10], 0);
        loop {
            match client.write(&piece) {
                Ok(written) => bytes += written,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return bytes,
                Err(error) => panic!("{error}"),
            }
        }
    }

    #[test]
    fn qemu_can_not_write_much_that_is_not_read() {
        let free = TcpListener::bind("127.7.0.8:0").unwrap().local_addr().unwrap();
        let listener = Listener::at_port("b", free).unwrap();
        let mut client = TcpStream::connect(free).unwrap();
        let mut taken = next(&listener, &us()).unwrap();
        let first = unread(&mut client);
        assert!(first < 1 << 20, "{first}");
        // If much is read fast, the kernel grows its buffers, unless their size is set.
        let mut read = vec![0; 1 << 20];
        for _ in 0..200 {
            let _ = taken.read(&mut read).unwrap();
            unread(&mut client);
        }
        let later = rustix::io::ioctl_fionread(&taken).unwrap();
        assert!(later < 1 << 20, "{later}");
    }

    #[test]
    fn a_path_is_taken_over_and_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("host-b.sock");
        fs::write(&path, "left behind").unwrap();
        let listener = Listener::at_path("b", &path, None).unwrap();
        assert_eq!(listener.target(), Target::Path(path.display().to_string()));
        let _client = UnixStream::connect(&path).unwrap();
        assert!(next(&listener, &us()).is_some());
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        // A host that left has returned while a connection uses its old listener.
        let again = Listener::at_path("b", &path, None).unwrap();
        drop(listener);
        let _client = UnixStream::connect(&path).unwrap();
        drop(again);
        assert!(!path.exists());
    }

    #[test]
    fn others_are_turned_away() {
        let us = rustix::process::geteuid().as_raw();
        let [nobody, several] = [vec![], vec![64055, 1001]].map(|qemu| Admitted { qemu });
        assert!(nobody.has(0) && !nobody.has(64055));
        assert!([0, 1001, 64055].iter().all(|uid| several.has(*uid)) && !several.has(1002));
        if us == 0 {
            return; // Root is never turned away.
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("host-b.sock");
        let listener = Listener::at_path("b", &path, None).unwrap();
        let _client = UnixStream::connect(&path).unwrap();
        assert!(next(&listener, &Admitted { qemu: vec![us + 1] }).is_none());
    }

    /// A connection that is closed has no owner: even root's is turned away.
    fn strangers(at: SocketAddr, connections: usize) {
        (0..connections).for_each(|_| drop(TcpStream::connect(at).unwrap()));
    }

    fn at_loopback() -> (Listener, SocketAddr) {
        let free = TcpListener::bind("127.7.0.6:0").unwrap().local_addr().unwrap();
        (Listener::at_port("b", free).unwrap(), free)
    }

    #[test]
    fn an_admitted_user_is_taken_among_strangers() {
        let (listener, at) = at_loopback();
        strangers(at, 100);
        let mut client = TcpStream::connect(at).unwrap();
        strangers(at, 10);
        let mut taken = take(&listener, &us()).unwrap();
        client.write_all(b"QEVM").unwrap();
        let mut read = [0; 4];
        taken.read_exact(&mut read).unwrap();
        assert_eq!(&read, b"QEVM");
        assert!(take(&listener, &us()).is_none());
    }

    /// Strangers that keep connecting don't delay the end of an agent.
    #[test]
    fn nobody_is_accepted_once_it_closes() {
        let (listener, at) = at_loopback();
        strangers(at, 100);
        assert!(listener.take(&us(), &AtomicBool::new(true)).unwrap().is_none());
        let Socket::Port(socket, _) = &listener.socket else { panic!("it has a port") };
        let left = std::iter::from_fn(|| socket.accept().ok()).count();
        assert_eq!(left, 100, "some were accepted");
    }
}
