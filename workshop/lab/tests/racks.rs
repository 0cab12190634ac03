//! Racks: traffic across the core is counted there, and nothing is left behind. Needs root.

use std::io::Write;
use std::process::{Command, Stdio};
use std::thread;

use lab::hosts::{Layout, RackHost, Racks};

static CONTENT: [u8; 1 << 20] = [7; 1 << 20];
const BYTES: u64 = CONTENT.len() as u64;
/// Headers and acknowledgements, and an occasional ARP packet.
const AROUND: u64 = BYTES / 8;
const PORT: u16 = 9000;

/// Sends bytes from one host to another, over TCP.
fn send(from: &RackHost, to: &RackHost) {
    let address = (to.host.addresses[0], PORT);
    let listener = to.host.within(|| std::net::TcpListener::bind(address).unwrap());
    let receiver = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        std::io::copy(&mut stream, &mut std::io::sink()).unwrap()
    });
    from.host.within(|| {
        let mut stream = std::net::TcpStream::connect(address).unwrap();
        stream.write_all(&CONTENT).unwrap();
    });
    assert_eq!(receiver.join().unwrap(), BYTES, "{} to {}", from.name, to.name);
}

fn namespaces() -> String {
    let list = Command::new("ip").args(["netns", "list"]).output().unwrap();
    String::from_utf8(list.stdout).unwrap()
}

#[test]
fn the_core_counts_what_crosses_racks_and_nothing_is_left() {
    let racks =
        Racks::new(Layout { source_hosts: 2, target_hosts: 3, ..Layout::default() }).unwrap();
    let (sources, targets) = (racks.sources(), racks.targets());
    let name = |host: &&RackHost| host.name.clone();
    let names: Vec<String> = sources.iter().chain(&targets).map(name).collect();
    assert_eq!(names, ["r1-h1", "r2-h1", "r1-h2", "r2-h2", "r3-h1", "r3-h2", "r3-h3"]);

    // Within racks, between source racks, to the target rack and back.
    let ways = [
        (sources[0], sources[2], 0, 0),
        (targets[0], targets[2], 0, 0),
        (sources[0], sources[1], BYTES, 0),
        (sources[3], targets[1], BYTES, 0),
        (targets[2], sources[2], 0, BYTES),
    ];
    for (from, to, from_sources, from_target) in ways {
        let (core, edges) = (racks.crossed().unwrap(), racks.edges().unwrap());
        send(from, to);
        let way = format!("{} to {}", from.name, to.name);
        let core = racks.crossed().unwrap() - core;
        for (counted, bytes) in [(core.from_sources, from_sources), (core.from_target, from_target)]
        {
            assert!((bytes..bytes + AROUND).contains(&counted), "{way}: {counted} for {bytes}");
        }
        let edges = racks.edges().unwrap() - edges;
        assert!((BYTES..BYTES + AROUND).contains(&edges.sent()), "{way}: {edges:?}");
        let delivered = edges.to_sources + edges.to_target;
        assert!((BYTES..BYTES + AROUND).contains(&delivered), "{way}: {edges:?}");
    }

    let mut sleeper = targets[1].host.command("sleep");
    let mut sleeper = sleeper.arg("1000").stdin(Stdio::null()).spawn().unwrap();
    while !targets[1].host.processes().unwrap().contains(&sleeper.id()) {
        thread::yield_now();
    }
    let own = targets[1].host.name.trim_end_matches("r3h2").to_owned();
    let made = namespaces().matches(&own).count();
    assert_eq!(made, 3 + 1 + 7, "three switches, the core, seven hosts");
    drop(racks);
    assert!(!sleeper.wait().unwrap().success(), "what ran on a host ends with it");
    assert!(!namespaces().contains(&own), "{}", namespaces());
}

#[test]
fn bystanders_are_at_both_ends_and_not_among_the_hosts() {
    let layout = Layout { source_racks: 1, source_hosts: 1, target_hosts: 1, ..Layout::default() };
    assert!(Racks::new(layout).unwrap().bystanders().is_none());
    let racks = Racks::new(Layout { bystanders: true, ..layout }).unwrap();
    let [here, there] = racks.bystanders().unwrap();
    assert_eq!((racks.hosts().len(), racks.sources().len(), racks.targets().len()), (2, 1, 1));
    let edges = racks.edges().unwrap();
    let core = racks.crossed().unwrap();
    let from = here.addresses[0];
    there.within(|| {
        let socket = std::net::UdpSocket::bind((there.addresses[0], PORT)).unwrap();
        socket.connect((from, PORT)).unwrap();
        // The port is closed; the ICMP error crosses the core, too.
        socket.send(&[1; 1000]).unwrap();
        assert!(socket.recv(&mut [0; 1]).is_err());
    });
    let core = racks.crossed().unwrap() - core;
    assert!(core.from_target >= 1000 && core.from_sources >= 100, "{core:?}");
    assert!((racks.edges().unwrap() - edges).sent() < 1000, "{:?}", racks.edges());
}

#[test]
fn hosts_whose_vms_are_joined_still_reach_each_other_by_their_edges() {
    let layout = Layout { source_racks: 1, source_hosts: 1, target_hosts: 1, ..Layout::default() };
    let racks = Racks::new(layout).unwrap();
    racks.join_vms(&["vm1", "vm2"]).unwrap();
    let (edges, core) = (racks.edges().unwrap(), racks.crossed().unwrap());
    send(racks.sources()[0], racks.targets()[0]);
    let sent = (racks.edges().unwrap() - edges).sent();
    assert!((BYTES..BYTES + AROUND).contains(&sent), "{sent}");
    assert!((racks.crossed().unwrap() - core).from_sources >= BYTES);
}
