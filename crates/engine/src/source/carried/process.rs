//! Finds the process of a QEMU that has connected to a door.
//!
//! libvirt may have made the connection and passed it to QEMU: over loopback the
//! kernel tells which process has it now, for a unix socket only which one made it.

use std::net::SocketAddr;
use std::os::unix::net::UnixStream;

use qemu::commanded::vcpu_threads;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{getpeername, getsockname};

/// A QEMU process, and the threads of its vCPUs.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Qemu {
    pub(super) pid: u32,
    pub(super) vcpus: Vec<u32>,
}

/// Finds the QEMU at the other end of a connection.
///
/// # Errors
/// If it or its vCPU threads can't be determined.
pub(super) fn of(main: &UnixStream) -> Result<Qemu, String> {
    let holders = holders(main)?;
    let with_vcpus = |pid: u32| {
        let vcpus = vcpu_threads(pid);
        (!vcpus.is_empty()).then_some(Qemu { pid, vcpus })
    };
    let mut found: Vec<Qemu> = holders.iter().copied().filter_map(with_vcpus).collect();
    match (found.pop(), &found[..]) {
        (Some(only), []) => Ok(only),
        (Some(_), _) => Err("several processes have its connection".to_owned()),
        (None, _) if holders.is_empty() => {
            Err("the agent may not see which process has its connection".to_owned())
        }
        (None, _) => Err(
            "of the process that connected no thread is known for a vCPU: QEMU names them with \
             -name debug-threads=on; and another program may have connected the unix socket"
                .to_owned(),
        ),
    }
}

fn holders(main: &UnixStream) -> Result<Vec<u32>, String> {
    let there = getpeername(main).ok().flatten().and_then(|it| SocketAddr::try_from(it).ok());
    let here = getsockname(main).ok().and_then(|it| SocketAddr::try_from(it).ok());
    match (there, here) {
        (Some(there), Some(here)) => {
            nic::processes_of(there, here).map_err(|error| error.to_string())
        }
        _ => match socket_peercred(main) {
            Ok(peer) => Ok(u32::try_from(peer.pid.as_raw_nonzero().get()).into_iter().collect()),
            Err(error) => Err(format!("the process that connected is not known: {error}")),
        },
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::OwnedFd;
    use std::sync::mpsc::channel;
    use std::thread;

    use super::*;

    #[test]
    fn qemu_is_the_process_with_the_connection_and_vcpus() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let caller = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let taken = UnixStream::from(OwnedFd::from(listener.accept().unwrap().0));
        let (unix, _other) = UnixStream::pair().unwrap();
        for socket in [&taken, &unix] {
            let error = of(socket).unwrap_err();
            assert!(error.contains("debug-threads=on"), "{error}");
        }
        let (tell, told) = channel();
        let (_stop, stopped) = channel::<()>();
        let vcpu = thread::Builder::new().name("CPU 0/TCG".to_owned());
        vcpu.spawn(move || {
            let link = fs::read_link("/proc/thread-self").unwrap();
            tell.send(link.file_name().unwrap().to_str().unwrap().parse().unwrap()).unwrap();
            let _ = stopped.recv();
        })
        .unwrap();
        let vcpus: Vec<u32> = vec![told.recv().unwrap()];
        for socket in [&taken, &unix] {
            assert_eq!(of(socket), Ok(Qemu { pid: std::process::id(), vcpus: vcpus.clone() }));
        }
        drop(caller);
    }
}
