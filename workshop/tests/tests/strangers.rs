//! Strangers hold every connection that they can get, and send nothing: hosts still reach each
//! other, and people reach the API.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use end_to_end::commander::{carrying, port};
use end_to_end::strangers::Strangers;
use end_to_end::{MIB, Side, World, bare, terminate, until};
use identity::Role;
use lab::agent::binary;
use lab::certificates::Certificates;
use lab::hosts::Link;
use lab::libvirt::WAITS_AT;
use rustix::process::{Resource, getrlimit, setrlimit};

const RATE: u64 = 2_000_000;
const AGENTS_PORT: u16 = 7800;
const API_PORT: u16 = 7801;

/// A port of host B.
fn at_b(world: &World, port: u16) -> SocketAddr {
    SocketAddr::new(world.host(Side::B).addresses[0], port)
}

/// Number of files that the agent of host B has open.
fn open_files(world: &World) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", world.agent(Side::B).pid())).unwrap().count()
}

#[test]
fn a_vm_comes_and_leaves_meanwhile() {
    let (world, _certificates) = World::secured(Link::unshaped());
    let guest = world.boot(&bare("192M", RATE));
    // From one address, and from more addresses than there are places.
    for (addresses, moves) in [(1, &[Side::A, Side::B][..]), (20, &[Side::A])] {
        let to = at_b(&world, AGENTS_PORT);
        let strangers = Strangers::start(world.host(Side::A), addresses, to, 400);
        until("they have all that they can get", || strangers.turned_away() > 0);
        for from in moves {
            let report = world.migrate(&guest, *from, &["--lanes", "16"]);
            assert!(report.lanes.iter().all(|lane| lane.deaths == 0), "{:?}", report.lanes);
        }
        assert!(open_files(&world) < 500);
        let turned_away = strangers.turned_away();
        until("they are there still", || strangers.turned_away() > turned_away);
        drop(strangers);
        until("nothing is left of them", || open_files(&world) < 60);
    }
}

/// Without certificates; at loopback others than root could have programs started as root.
#[test]
fn another_user_of_the_host_is_refused() {
    let world = World::new(Link::unshaped());
    let connect = |by: &[&str]| {
        // The agent closes it at once, or after the time in which a peer has to say what it wants.
        let script = format!("exec 3<>/dev/tcp/127.0.0.1/{AGENTS_PORT}; cat <&3");
        let mut command = world.host(Side::B).command(by[0]);
        command.args(&by[1..]).args(["bash", "-c", &script]).stdin(Stdio::null());
        assert!(command.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok());
    };
    let refused = || world.agent(Side::B).log_text().matches("its user id: 65534").count();
    connect(&["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]);
    until("nobody is refused", || refused() == 1);
    connect(&["setpriv", "--clear-groups"]);
    assert_eq!(refused(), 1);
    assert!(!world.agent(Side::B).log_text().contains("its user id: 0"));
}

#[test]
fn the_api_answers_meanwhile() {
    let (mut world, certificates) = World::secured(Link::unshaped());
    let listen = format!("0.0.0.0:{API_PORT}");
    let usual = ["--tls", &Certificates::place(), "--api-listen", &listen];
    world.tell_agents(usual.map(str::to_owned).to_vec());
    let tls = certificates.person("ann", Role::Observe).unwrap();
    // Its certificate names the host, so it has to be called by that name.
    let names = tls.with_extension("hosts");
    std::fs::write(&names, format!("{} host-b\n", world.host(Side::B).addresses[0])).unwrap();
    let mut mount = world.host(Side::A).command("mount");
    assert!(mount.arg("--bind").arg(&names).arg("/etc/hosts").status().unwrap().success());
    let list = || {
        let mut list = world.host(Side::A).command(binary());
        list.args(["--api", &format!("https://host-b:{API_PORT}"), "--tls"]).arg(&tls).arg("list");
        let mut list = list.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
        let mut ended = None;
        until("the API answers", || {
            ended = list.try_wait().unwrap();
            ended.is_some()
        });
        assert!(ended.is_some_and(|status| status.success()));
    };
    for addresses in [1, 20] {
        let to = at_b(&world, API_PORT);
        let strangers = Strangers::start(world.host(Side::A), addresses, to, 600);
        until("they have all that they can get", || strangers.turned_away() > 0);
        for _ in 0..10 {
            list();
        }
        assert!(open_files(&world) < 300);
        drop(strangers);
        until("nothing is left of them", || open_files(&world) < 60);
    }
    world.says(Side::B, &["list"]);
}

/// Ports at which an agent stands for another host.
const PORTS: u16 = 64;

/// A script that another user of host A runs. It ends when this is dropped.
struct AnotherUser(Child);

impl Drop for AnotherUser {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Another user of host A runs this script of bash's.
fn another_user(world: &World, script: &str) -> AnotherUser {
    let mut command = world.host(Side::A).command("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "bash", "-c", script]);
    AnotherUser(command.stdin(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
}

/// The number of bytes that the agent of host A has read.
fn read_bytes(world: &World) -> u64 {
    let path = format!("/proc/{}/io", world.agent(Side::A).pid());
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap().parse().unwrap()
}

/// Whose a connection is, the agent finds out without reading about the others. Other users of the
/// host keep nobody from being carried, and the agent from nothing.
#[test]
fn another_user_does_not_block_carried_migrations() {
    const OTHERS: usize = 1000;
    // The agent logs 100 lines of a kind within some seconds.
    const REFUSED: usize = 50;
    let mut files = getrlimit(Resource::Nofile);
    files.current = files.maximum;
    setrlimit(Resource::Nofile, files).unwrap();
    let mut world = World::new(Link::unshaped());
    carrying(&mut world);
    let others: Vec<_> = world.host(Side::A).within(|| {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        let connect = || (TcpStream::connect(at).unwrap(), listener.accept().unwrap());
        (0..OTHERS).map(|_| connect()).collect()
    });
    let (first, last) = (port(Side::B), port(Side::B) + PORTS - 1);

    let before = read_bytes(&world);
    let one_by_one = format!(
        "for ((n = 0; n < {REFUSED}; n++)); do exec 3<>/dev/tcp/127.7.0.2/{first}; read -r <&3; \
         done"
    );
    assert!(another_user(&world, &one_by_one).0.wait().is_ok());
    let log = || world.agent(Side::A).log_text();
    let refused = || {
        let log = world.agent(Side::A).whole_log();
        let refused = log.lines().filter(|line| line.contains("rejected a connection"));
        let counts =
            refused.filter_map(|line| line.split_once(" connections=")?.1.split(' ').next());
        counts.map(|count| count.parse::<usize>().unwrap()).sum::<usize>()
    };
    until("each is refused", || refused() == REFUSED);
    // A list of these sockets has more than that for each refused connection.
    let read = read_bytes(&world) - before;
    assert!(read < 4 * MIB, "{read} bytes for {REFUSED} connections among {OTHERS}");
    drop(others);

    let all_the_time = format!(
        "while :; do for ((n = {first}; n <= {last}; n++)); do exec 3<>/dev/tcp/127.7.0.2/$n; done; \
         read -rt 0.01 <&3; done"
    );
    let mut strangers = another_user(&world, &all_the_time);
    until("they are at the last port", || log().contains(&format!("127.7.0.2:{last}")));
    let there = (WAITS_AT, last);
    let listener = world.host(Side::B).within(|| TcpListener::bind(there).unwrap());
    let server = thread::spawn(move || {
        let mut disk = listener.accept().unwrap().0;
        disk.write_all(b"NBDMAGICIHAVEOPT").unwrap();
        disk
    });
    let here = ("127.7.0.2", last);
    let mut client = world.host(Side::A).within(|| TcpStream::connect(here).unwrap());
    client.read_exact(&mut [0; 16]).unwrap();
    drop((client, server.join().unwrap()));

    terminate(world.agent(Side::A).pid());
    until("the agent has ended", || world.has_ended(Side::A));
    assert!(strangers.0.try_wait().unwrap().is_none(), "nobody connected any more");
}

/// The number of threads of a host's agent.
fn threads(world: &World, side: Side) -> usize {
    std::fs::read_dir(format!("/proc/{}/task", world.agent(side).pid())).unwrap().count()
}

/// QEMU's user may connect: what is carried for it has so many threads at both hosts, and these end
/// with it. All connections here go to one host, and to a server that speaks first.
#[test]
fn carried_connections_have_so_many_threads() {
    const CONNECTIONS: usize = 120;
    /// What one host has of another's arrivals.
    const ACCEPTED_MAX: usize = 24;
    /// What leads a connection, reads and writes it, and measures it.
    const THREADS_OF_ONE: usize = 16;
    let mut world = World::new(Link::unshaped());
    carrying(&mut world);
    let both = |world: &World| [Side::A, Side::B].map(|side| threads(world, side));
    let before = both(&world);
    let at = port(Side::B);
    let listener = world.host(Side::B).within(|| TcpListener::bind((WAITS_AT, at)).unwrap());
    let over = Arc::new(AtomicBool::new(false));
    let is_over = Arc::clone(&over);
    let server = thread::spawn(move || {
        let mut disks = Vec::new();
        while let Ok((mut disk, _)) = listener.accept() {
            if is_over.load(Ordering::Relaxed) {
                break;
            }
            let _ = disk.write_all(b"NBDMAGICIHAVEOPT");
            disks.push(disk);
        }
    });
    let here = ("127.7.0.2", at);
    let mut clients: Vec<_> = world
        .host(Side::A)
        .within(|| (0..CONNECTIONS).map(|_| TcpStream::connect(here).unwrap()).collect());
    // Those that the other host does not accept are closed.
    let is_carried = |client: &mut TcpStream| client.read_exact(&mut [0; 16]).is_ok();
    let carried = clients.iter_mut().map(is_carried).filter(|carried| *carried).count();
    assert!((1..=ACCEPTED_MAX).contains(&carried), "{carried} are carried");
    for (now, before) in both(&world).into_iter().zip(before) {
        assert!(now <= before + carried * THREADS_OF_ONE, "{now} threads for {carried}");
    }
    drop(clients);
    over.store(true, Ordering::Relaxed);
    world.host(Side::B).within(|| TcpStream::connect((WAITS_AT, at)).unwrap());
    server.join().unwrap();
    until("their threads have ended", || {
        both(&world).into_iter().zip(before).all(|(now, before)| now <= before + 8)
    });
}
