//! The network of the field lab's guests: a tap on a bridge at each host, and a DHCP server behind
//! the bridges.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::Duration;

use crate::error::{Result, SystemContext};
use crate::hosts::{Hosts, Outside};

const RANGE: &str = "10.78.0.100,10.78.0.199,10m";
/// The card of [`Outside::arguments`] has always this address, on whatever host and in whatever
/// test.
const CARD: &str = "52:54:00:77:00:01,10.78.0.20";
/// The guest's address.
const GUEST: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 78, 0, 20));
const SSH: u16 = 22;
const CONNECT_MAX: Duration = Duration::from_secs(2);
/// A busy guest takes seconds to start a process for a client, and each that leaves costs as much.
const GREETING_MAX: Duration = Duration::from_secs(60);

/// The network. Dropping it removes it.
#[derive(Debug)]
pub struct Lan {
    outside: Outside,
    server: Child,
}

impl Lan {
    /// Joins two hosts by it.
    ///
    /// # Errors
    /// If `ip` fails, or the server can't be started.
    pub fn join(hosts: &Hosts) -> Result<Self> {
        let outside = Outside::join(hosts)?;
        let dir = &outside.host.run_dir;
        let log = fs::File::create(log(&outside)).doing("make the DHCP server's log")?;
        let mut serve = outside.host.command("dnsmasq");
        serve.args(["--keep-in-foreground", "--conf-file=/dev/null", "--port=0", "--user=root"]);
        // It renews leases that the guest had from the server of another test.
        serve.arg("--dhcp-authoritative");
        serve.args(["--log-facility=-", "--log-dhcp", "--no-ping", "--bind-interfaces"]);
        serve.arg(format!("--dhcp-range={RANGE}")).arg(format!("--dhcp-host={CARD}"));
        serve.arg(format!("--dhcp-leasefile={}", dir.join("leases").display()));
        serve.arg(format!("--pid-file={}", dir.join("dnsmasq.pid").display()));
        serve.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let server = serve.spawn().doing("start the DHCP server")?;
        Ok(Self { outside, server })
    }

    /// How many leases the server has given or renewed.
    #[must_use]
    pub fn leases(&self) -> usize {
        let log = fs::read_to_string(log(&self.outside)).unwrap_or_default();
        log.matches("DHCPACK(").count()
    }

    /// Whether the guest's SSH server greets a client on the network.
    #[must_use]
    pub fn greets(&self) -> bool {
        self.outside.host.within(|| {
            let stream = TcpStream::connect_timeout(&SocketAddr::new(GUEST, SSH), CONNECT_MAX);
            let Ok(mut stream) = stream else { return false };
            let mut greeting = [0; 4];
            let waits = stream.set_read_timeout(Some(GREETING_MAX));
            waits.and_then(|()| std::io::Read::read_exact(&mut stream, &mut greeting)).is_ok()
                && greeting == *b"SSH-"
        })
    }
}

fn log(outside: &Outside) -> PathBuf {
    outside.host.run_dir.join("dhcp.log")
}

impl Drop for Lan {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}
