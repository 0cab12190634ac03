//! A directory in a real Redis.

use std::thread;
use std::time::{Duration, Instant};

use directory::{Answer, Directory, DirectoryError, Redis, RedisSettings, Servers};
use redis::{Connection, cmd};
use rustix::process::{Signal, kill_process};

use crate::cases::{self, TERMS};
use crate::redis_server::RedisServer;
use crate::world::{World, claim, host, names, soon};

pub(crate) fn settings(servers: Servers) -> RedisSettings {
    let (cluster, rack) = ("lab".to_owned(), "r1".to_owned());
    RedisSettings { servers, cluster, rack, terms: TERMS, connections: 3 }
}

pub(crate) fn keys(connection: &mut Connection) -> Vec<Vec<u8>> {
    cmd("KEYS").arg("*").query(connection).unwrap()
}

/// Lets time pass by shortening the keys' times to live.
pub(crate) fn pass(connection: &mut Connection, time: Duration) {
    let passed = i64::try_from(time.as_millis()).unwrap();
    for key in keys(connection) {
        let left: i64 = cmd("PTTL").arg(&key).query(connection).unwrap();
        let () = cmd("PEXPIRE").arg(&key).arg(left - passed).query(connection).unwrap();
    }
}

struct InRedis {
    directory: Redis,
    server: RedisServer,
}

impl InRedis {
    fn new() -> Self {
        let server = RedisServer::on_socket();
        let directory = Redis::new(&settings(Servers::One(server.url().to_owned()))).unwrap();
        Self { directory, server }
    }
}

impl World for InRedis {
    fn directory(&self) -> &dyn Directory {
        &self.directory
    }

    fn pass(&self, time: Duration) {
        pass(&mut self.server.connection().unwrap(), time);
    }
}

#[test]
fn it_does_what_all_do() {
    cases::check(&InRedis::new());
}

/// Every key has a time to live, and starts with its owner.
#[test]
fn nothing_is_kept_for_ever() {
    let world = InRedis::new();
    let all = names("ttl", 0..10);
    claim(&world.directory, &host("a"), &all[..5]);
    world.directory.hold(&host("a"), &all[5..], soon()).unwrap();
    world.directory.forget(&host("b"), soon()).unwrap();
    let mut connection = world.server.connection().unwrap();
    let keys = keys(&mut connection);
    assert_eq!(keys.len(), 11);
    for key in keys {
        assert!(key.starts_with(b"droveway:lab:r1:"), "{key:?}");
        let left: i64 = cmd("PTTL").arg(&key).query(&mut connection).unwrap();
        assert!(left > 0, "{key:?}: {left}");
    }
}

/// Racks and clusters are separate from each other.
#[test]
fn racks_are_apart() {
    let world = InRedis::new();
    let all = names("racks", 0..10);
    claim(&world.directory, &host("a"), &all);
    let servers = Servers::One(world.server.url().to_owned());
    for (cluster, rack) in [("lab", "r2"), ("lab2", "r1")] {
        let (cluster, rack) = (cluster.to_owned(), rack.to_owned());
        let other = Redis::new(&RedisSettings { cluster, rack, ..settings(servers.clone()) });
        assert_eq!(claim(&other.unwrap(), &host("b"), &all), vec![Answer::Yours; 10]);
    }
    let same = Redis::new(&settings(servers)).unwrap();
    assert_eq!(claim(&same, &host("b"), &all), vec![Answer::Coming(host("a")); 10]);
}

/// A host that another client has forgotten is forgotten for this one.
#[test]
fn a_host_is_forgotten_by_all_clients() {
    let world = InRedis::new();
    let other = Redis::new(&settings(Servers::One(world.server.url().to_owned()))).unwrap();
    let all = names("clients", 0..100);
    let [one, two] = ["a", "b"].map(host);
    claim(&world.directory, &one, &all);
    other.forget(&one, soon()).unwrap();
    // Its next claim is valid, although this client has not yet read that the host was forgotten.
    assert_eq!(claim(&world.directory, &one, &all), vec![Answer::Yours; 100]);
    assert_eq!(claim(&other, &two, &all), vec![Answer::Coming(one); 100]);
}

/// Records that other programs have written are replaced or not understood, and do no more harm.
#[test]
fn foreign_records_do_no_harm() {
    let world = InRedis::new();
    let mut connection = world.server.connection().unwrap();
    let all = names("poison", 0..4);
    let texts = ["", "hold 0 not/a/host", "claim x a", &"y".repeat(100_000)];
    for (name, text) in all.iter().zip(texts) {
        let key = [b"droveway:lab:r1:".as_slice(), &name.0].concat();
        let () = cmd("SET").arg(key).arg(text).query(&mut connection).unwrap();
    }
    let () = cmd("HSET")
        .arg(b"droveway:lab:r1:hosts")
        .arg(&["a", "many", "/", "7", "b", "1"])
        .query(&mut connection)
        .unwrap();
    assert_eq!(claim(&world.directory, &host("a"), &all), vec![Answer::Yours; 4]);
    assert_eq!(claim(&world.directory, &host("b"), &all), vec![Answer::Coming(host("a")); 4]);
    // The server refuses a list in a string's place.
    let key = [b"droveway:lab:r1:".as_slice(), &names("list", 0..1)[0].0].concat();
    let () = cmd("RPUSH").arg(key).arg("x").query(&mut connection).unwrap();
    let mut answers = Vec::new();
    let said = world.directory.claim(&host("a"), &names("list", 0..2), &mut answers, soon());
    assert!(matches!(said, Err(DirectoryError::Refused { .. })), "{said:?}");
    assert!(answers.is_empty());
    assert_eq!(claim(&world.directory, &host("b"), &all), vec![Answer::Coming(host("a")); 4]);
}

pub(crate) fn works_again(directory: &Redis) {
    let until = soon();
    let mut answers = Vec::new();
    while let Err(error) = directory.claim(&host("z"), &names("again", 0..9), &mut answers, until) {
        assert!(Instant::now() < until, "{error}");
        thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(answers, vec![Answer::Yours; 9]);
}

#[test]
fn a_server_that_is_killed_is_an_error_and_one_that_comes_back_works() {
    let mut world = InRedis::new();
    let all = names("killed", 0..1000);
    thread::scope(|scope| {
        let directory = &world.directory;
        let asking: Vec<_> = (0..6)
            .map(|number| {
                let all = &all;
                scope.spawn(move || {
                    let host = host(&format!("h{number}"));
                    let ask = || directory.claim(&host, all, &mut Vec::new(), soon());
                    std::iter::repeat_with(ask).find_map(Result::err)
                })
            })
            .collect();
        claim(directory, &host("h"), &all);
        world.server.kill();
        for one in asking {
            let error = one.join().unwrap().unwrap();
            assert!(matches!(error, DirectoryError::Unreachable { .. }), "{error}");
        }
    });
    world.server.restart();
    works_again(&world.directory);
}

/// A server that is stopped: each caller waits until its deadline, even if no thread is free for
/// its job.
#[test]
fn a_server_that_stands_still_is_late() {
    let world = InRedis::new();
    let signal = |signal| kill_process(world.server.pid(), signal).unwrap();
    let all = names("still", 0..100);
    claim(&world.directory, &host("a"), &all);
    signal(Signal::STOP);
    thread::scope(|scope| {
        let asking: Vec<_> = (0..20)
            .map(|number: u64| {
                let (directory, all) = (&world.directory, &all);
                let until = Instant::now() + Duration::from_millis(number * 20);
                scope.spawn(move || directory.claim(&host("b"), all, &mut Vec::new(), until))
            })
            .collect();
        for one in asking {
            let said = one.join().unwrap();
            assert!(matches!(said, Err(DirectoryError::Late { .. })), "{said:?}");
        }
    });
    signal(Signal::CONT);
    works_again(&world.directory);
}

#[test]
fn invalid_settings_are_refused() {
    let good = settings(Servers::One("redis://127.0.0.1".to_owned()));
    let bad = [
        RedisSettings { rack: "a:b".to_owned(), ..good.clone() },
        RedisSettings { cluster: String::new(), ..good.clone() },
        RedisSettings { servers: Servers::One("http://x".to_owned()), ..good.clone() },
        RedisSettings { servers: Servers::Cluster(Vec::new()), ..good },
    ];
    for settings in bad {
        let error = Redis::new(&settings).unwrap_err();
        assert!(matches!(error, DirectoryError::Settings(_)), "{error}");
    }
}
