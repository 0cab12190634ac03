//! The operator's next steps, as commands to paste.

use std::fmt::Write;
use std::net::{IpAddr, UdpSocket};

use agent::config::PeerEntry;

use super::cluster::Cluster;
use super::place::Placed;
use crate::output::quoted;

/// The steps after the archives are made.
pub(crate) fn after_make(cluster: &Cluster) -> String {
    let mut text = format!(
        "Keep {} and the archives secret: the first allows to pose as any host, an archive\nas its \
         host.\n\nNext, with droveway installed on each host:\n",
        cluster.dir().join("ca.key").display()
    );
    for host in cluster.hosts() {
        text.push_str(&on_host(cluster, host));
    }
    let ports: Vec<String> = ports(cluster.hosts()).iter().map(u16::to_string).collect();
    // Writing to a string does not fail.
    let _ = write!(
        text,
        "\nEach prints what it did and how to start the agent. The hosts reach each other at TCP \
         port {}: open\nit in their firewalls, for each other.\n",
        ports.join(", ")
    );
    let user = match cluster.qemu_user() {
        Some(user) => format!(
            "QEMU runs as {user} on these hosts: the user has to exist there, and be allowed to \
             open /dev/kvm and\nthe VMs' images."
        ),
        None => {
            "No --qemu-user NAME was given: where the agent's file names no user, QEMU runs as \
                 root, and a guest\nthat breaks out of it owns the host."
                .to_owned()
        }
    };
    let _ = write!(text, "\n{user}\n");
    if let [first, second, ..] = cluster.hosts() {
        let _ = write!(text, "\nThen, on {}:\n  droveway doctor {}\n", first.name, second.name);
    }
    text
}

fn on_host(cluster: &Cluster, host: &PeerEntry) -> String {
    let archive = cluster.archive(&host.name);
    let path = quoted(&archive.to_string_lossy());
    let name = &host.name;
    if is_here(host.address.ip()) {
        return format!("\n{name}, which is this host:\n  droveway init --from {path}\n");
    }
    // scp takes the part before the first colon as a host.
    let to = match host.address.ip() {
        IpAddr::V4(ip) => format!("root@{ip}:"),
        IpAddr::V6(ip) => format!("'root@[{ip}]:'"),
    };
    format!(
        "\n{name}:\n  scp -p {path} {to}\n  ssh root@{ip} 'droveway init --from {name}.tar && rm \
         {name}.tar'\n",
        ip = host.address.ip()
    )
}

/// Whether an address is this host's: only then can a socket be bound to it.
fn is_here(ip: IpAddr) -> bool {
    UdpSocket::bind((ip, 0)).is_ok()
}

fn ports(hosts: &[PeerEntry]) -> Vec<u16> {
    let mut ports: Vec<u16> = hosts.iter().map(|host| host.address.port()).collect();
    ports.sort_unstable();
    ports.dedup();
    ports
}

/// The steps after a host's files are in place.
pub(crate) fn after_place(placed: &Placed) -> String {
    let name = &placed.name;
    let mut text = if placed.is_first() {
        format!("Next, on {name}:\n  systemctl enable --now droveway\n")
    } else if placed.needs_restart() {
        format!(
            "Next, on {name}, while it moves no VM (VMs run on):\n  systemctl restart droveway\n"
        )
    } else if placed.has_new_peers() {
        "An agent that runs reads the peers file again within half a minute. If none runs yet:\n  \
         systemctl enable --now droveway\n"
            .to_owned()
    } else {
        "Nothing was changed. If the agent doesn't run yet:\n  systemctl enable --now droveway\n"
            .to_owned()
    };
    if let Some(other) = &placed.other {
        let _ = write!(
            text,
            "Then check it, and the connection to another host once the agent there runs:\n  \
             droveway doctor {other}\n"
        );
    }
    text
}
