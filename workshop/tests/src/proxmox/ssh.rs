//! Proxmox VE's tunnel, with OpenSSH at both ends.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use lab::hosts::{Host, RUN_DIR};
use lab::{program, setup};

use crate::until;

const SSHD: &str = include_str!("sshd.sh");

/// ssh at the source and sshd at the destination.
pub struct Ssh {
    client: Child,
    server: Child,
}

impl Ssh {
    /// Has ssh listen on these sockets of `from`, and forward to those of `to`.
    ///
    /// # Panics
    /// If ssh or sshd can't be started; all functions of this file panic on failure.
    #[must_use]
    pub fn open(from: &Host, to: &Host, sockets: &[String]) -> Self {
        let (here, there) = (from.run_dir.join("ssh"), to.run_dir.join("ssh"));
        for dir in [&here, &there] {
            let _ = fs::remove_dir_all(dir);
            fs::create_dir_all(dir).unwrap();
        }
        make_key(&here.join("user"));
        make_key(&there.join("host"));
        fs::copy(here.join("user.pub"), there.join("user.pub")).unwrap();
        let known = fs::read_to_string(there.join("host.pub")).unwrap();
        fs::write(here.join("known"), format!("host-b {known}")).unwrap();
        let inside = format!("{RUN_DIR}/ssh");
        let config = format!("IdentityFile {inside}/user\nUserKnownHostsFile {inside}/known\n");
        fs::write(here.join("config"), config).unwrap();
        let server = serve(to);
        let address = to.addresses[0].to_string();
        until("sshd listens", || reached(from, &address));
        // As in SSHInfo.pm, and in fork_ssh_tunnel of Tunnel.pm, but with keys of the test's own.
        let mut client = from.command("/usr/bin/ssh");
        client.args(["-F", &format!("{inside}/config")]);
        client.args(["-e", "none", "-o", "BatchMode=yes", "-o", "HostKeyAlias=host-b"]);
        client.arg(format!("root@{address}")).args(["-o ExitOnForwardFailure=yes"]);
        for socket in sockets {
            client.args(["-L", &format!("{socket}:{socket}")]);
        }
        client.args(["/usr/sbin/qm", "mtunnel"]);
        let mut client = client.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let said = BufReader::new(client.stdout.take().unwrap()).lines().next();
        let said = said.map(Result::unwrap);
        let ssh = Self { client, server };
        assert_eq!(said.as_deref(), Some("tunnel online"));
        ssh
    }
}

impl Drop for Ssh {
    fn drop(&mut self) {
        for child in [&mut self.client, &mut self.server] {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn make_key(path: &Path) {
    let mut make = Command::new("ssh-keygen");
    make.args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(path);
    program::output(&mut make).unwrap();
}

fn serve(host: &Host) -> Child {
    let tree = setup::sshd().unwrap();
    let mut command = host.command("unshare");
    command.args(["--mount", "sh", "-c", SSHD, "sshd"]).arg(tree).arg(&host.run_dir).arg(RUN_DIR);
    let log = fs::File::create(host.run_dir.join("sshd.log")).unwrap();
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().unwrap()
}

fn reached(from: &Host, address: &str) -> bool {
    let address = format!("{address}:22").parse().unwrap();
    let wait = std::time::Duration::from_secs(1);
    from.within(|| std::net::TcpStream::connect_timeout(&address, wait).is_ok())
}
