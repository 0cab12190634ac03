//! A directory in a real Redis Cluster of three servers.

use std::net::TcpListener;
use std::time::{Duration, Instant};
use std::{io, thread};

use directory::{Directory, Redis, Servers};
use redis::cmd;

use crate::cases;
use crate::redis::{keys, pass, settings, works_again};
use crate::redis_server::RedisServer;
use crate::world::{World, claim, host, names};

const SLOTS: u32 = 16_384;
const SERVERS: u32 = 3;
const FORMED_MAX: Duration = Duration::from_secs(60);
/// A cluster's servers talk to each other on their ports plus this number.
const BUS: u16 = 10_000;

struct InCluster {
    directory: Redis,
    servers: Vec<RedisServer>,
}

/// A free port whose bus port is free, too.
fn free_port() -> io::Result<u16> {
    loop {
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let bus = port.checked_add(BUS).map(|bus| TcpListener::bind(("127.0.0.1", bus)));
        if matches!(bus, Some(Ok(_))) {
            return Ok(port);
        }
    }
}

impl InCluster {
    fn new() -> Self {
        let servers: Vec<_> =
            (0..SERVERS).map(|_| RedisServer::on_port(free_port().unwrap())).collect();
        for (number, server) in (0..SERVERS).zip(&servers) {
            let mut connection = server.connection().unwrap();
            let (first, last) = (SLOTS * number / SERVERS, SLOTS * (number + 1) / SERVERS - 1);
            let mut slots = cmd("CLUSTER");
            slots.arg("ADDSLOTSRANGE").arg(first).arg(last);
            let () = slots.query(&mut connection).unwrap();
            for other in &servers {
                let port = other.url().rsplit_once(':').unwrap().1;
                let mut meet = cmd("CLUSTER");
                meet.arg("MEET").arg("127.0.0.1").arg(port);
                let () = meet.query(&mut connection).unwrap();
            }
        }
        servers.iter().for_each(wait);
        let urls = servers.iter().map(|server| server.url().to_owned()).collect();
        Self { directory: Redis::new(&settings(Servers::Cluster(urls))).unwrap(), servers }
    }
}

/// Waits until the server knows which server has which slots.
fn wait(server: &RedisServer) {
    let until = Instant::now() + FORMED_MAX;
    let mut connection = server.connection().unwrap();
    loop {
        let info: String = cmd("CLUSTER").arg("INFO").query(&mut connection).unwrap();
        if info.contains("cluster_state:ok") && info.contains("cluster_known_nodes:3") {
            return;
        }
        assert!(Instant::now() < until, "no cluster: {info}");
        thread::sleep(Duration::from_millis(20));
    }
}

impl World for InCluster {
    fn directory(&self) -> &dyn Directory {
        &self.directory
    }

    fn pass(&self, time: Duration) {
        self.servers.iter().for_each(|server| pass(&mut server.connection().unwrap(), time));
    }
}

#[test]
fn it_does_what_all_do() {
    let world = InCluster::new();
    cases::check(&world);
    for server in &world.servers {
        assert!(
            keys(&mut server.connection().unwrap()).len() > 1000,
            "all of them have their share"
        );
    }
}

/// One server of three ends. That is an error, because it has some of each batch, and not a hang.
/// When it is back, the cluster works again.
#[test]
fn a_server_that_is_killed_is_an_error_and_one_that_comes_back_works() {
    let mut world = InCluster::new();
    let all = names("killed", 0..1000);
    claim(&world.directory, &host("a"), &all);
    world.servers[1].kill();
    let until = Instant::now() + Duration::from_secs(2);
    let said = world.directory.claim(&host("a"), &all, &mut Vec::new(), until);
    assert!(said.is_err(), "{said:?}");
    world.servers[1].restart();
    works_again(&world.directory);
}
