//! Strangers hold every connection that they can get, and send nothing: hosts still reach each
//! other, and people reach the API.

use std::net::SocketAddr;
use std::process::Stdio;

use end_to_end::strangers::Strangers;
use end_to_end::{Side, World, bare, until};
use identity::Role;
use lab::agent::binary;
use lab::certificates::Certificates;
use lab::hosts::Link;

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
    for addresses in [1, 20] {
        let to = at_b(&world, AGENTS_PORT);
        let strangers = Strangers::start(world.host(Side::A), addresses, to, 400);
        until("they have all that they can get", || strangers.turned_away() > 0);
        for from in [Side::A, Side::B] {
            let report = world.migrate(&guest, from, &["--lanes", "16"]);
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
