//! Finds the process of a QEMU that has connected to a listener.
//!
//! libvirt may have made the connection and passed it to QEMU: over loopback the
//! kernel tells which process has it now, for a unix socket only which one made it.

use std::net::SocketAddr;
use std::os::unix::net::UnixStream;

use host::nic;
use qemu::commanded::{Commanded, vcpu_threads};
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
            Err("the agent may not read which process has its connection".to_owned())
        }
        (None, _) => Err(
            "of the process that connected no thread is known for a vCPU: QEMU names them with \
             -name debug-threads=on; and another program may have connected the unix socket"
                .to_owned(),
        ),
    }
}

/// The UUID of the VM at the other end of a connection, if it is not the VM that is `expected`. As
/// far as that is known: a QEMU may have no UUID on its command line, and another program may have
/// connected for it.
pub(super) fn other_vm(main: &UnixStream, expected: &str) -> Option<String> {
    let holders = holders(main).ok()?;
    let uuid = |pid: &u32| Commanded::of_process(*pid).ok()?.uuid;
    let mut found = holders.iter().filter_map(uuid);
    let first = found.next()?;
    let is_it = |uuid: &str| uuid.eq_ignore_ascii_case(expected);
    (!is_it(&first) && !found.any(|uuid| is_it(&uuid))).then_some(first)
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
    use std::process::Command;
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

    #[test]
    fn a_vm_is_known_by_its_uuid() {
        const ITS_OWN: &str = "4dea22b3-1d52-d8f3-2516-782e98ab3fa0";
        const ANOTHER: &str = "4dea22b3-1d52-d8f3-2516-782e98ab3fa1";
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let caller = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let taken = UnixStream::from(OwnedFd::from(listener.accept().unwrap().0));
        assert_eq!(other_vm(&taken, ITS_OWN), None, "no UUID is known");
        // It has the connection, as QEMU has one that libvirt made.
        let mut qemu = Command::new("sh");
        qemu.args(["-c", "read end", "qemu", "-uuid", &ITS_OWN.to_uppercase()]);
        let mut qemu = qemu.stdin(OwnedFd::from(caller)).spawn().unwrap();
        while !fs::read_to_string(format!("/proc/{}/cmdline", qemu.id())).unwrap().contains("-uuid")
        {
            thread::yield_now();
        }
        assert_eq!(other_vm(&taken, ITS_OWN), None);
        assert_eq!(other_vm(&taken, ANOTHER), Some(ITS_OWN.to_uppercase()));
        drop(taken);
        qemu.wait().unwrap();
    }
}
