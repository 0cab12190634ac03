//! Real Redis servers, which end with their test.

use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

use redis::{Client, Connection, RedisResult};
use rustix::process::Pid;
use test_scope::TestDir;

const STARTED_MAX: Duration = Duration::from_secs(30);

/// A server on a socket, or on a loopback port.
pub(crate) struct RedisServer {
    dir: TestDir,
    arguments: Vec<String>,
    url: String,
    child: Child,
}

impl RedisServer {
    pub(crate) fn on_socket() -> Self {
        let dir = TestDir::new();
        let socket = dir.path().join("socket").display().to_string();
        let arguments = ["--port", "0", "--unixsocket", &socket].map(str::to_owned);
        Self::start(dir, &arguments, format!("redis+unix://{socket}"))
    }

    /// A server of a cluster.
    pub(crate) fn on_port(port: u16) -> Self {
        let port = port.to_string();
        let arguments = ["--port", &port, "--bind", "127.0.0.1", "--cluster-enabled", "yes"];
        let url = format!("redis://127.0.0.1:{port}");
        Self::start(TestDir::new(), &arguments.map(str::to_owned), url)
    }

    fn start(dir: TestDir, arguments: &[String], url: String) -> Self {
        let child = spawn(&dir, arguments);
        let mut server = Self { dir, arguments: arguments.to_vec(), url, child };
        server.wait();
        server
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// A connection of the test's own.
    pub(crate) fn connection(&self) -> RedisResult<Connection> {
        Client::open(self.url.as_str())?.get_connection_with_timeout(Duration::from_secs(5))
    }

    pub(crate) fn kill(&mut self) {
        // It may have ended already, which the test will notice.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Restarts it in the same place, empty.
    pub(crate) fn restart(&mut self) {
        self.kill();
        self.child = spawn(&self.dir, &self.arguments);
        self.wait();
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    fn wait(&mut self) {
        let until = Instant::now() + STARTED_MAX;
        let ping = |mut connection| redis::cmd("PING").query::<String>(&mut connection);
        while let Err(error) = self.connection().and_then(ping) {
            let ended = self.child.try_wait().unwrap();
            let log = std::fs::read_to_string(self.log()).unwrap_or_default();
            assert!(ended.is_none(), "redis-server has ended: {log}");
            assert!(Instant::now() < until, "redis-server doesn't start: {error}: {log}");
            thread::sleep(Duration::from_millis(20));
        }
    }

    fn log(&self) -> PathBuf {
        self.dir.path().join("log")
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        self.kill();
    }
}

fn spawn(dir: &TestDir, arguments: &[String]) -> Child {
    let log = File::create(dir.path().join("log")).unwrap();
    let mut command = Command::new("redis-server");
    command.args(["--save", "", "--appendonly", "no", "--daemonize", "no", "--maxmemory", "64mb"]);
    command.arg("--dir").arg(dir.path()).args(arguments);
    command.stdout(log.try_clone().unwrap()).stderr(log);
    command.spawn().unwrap_or_else(|error| {
        panic!("can't start redis-server: {error}; `make setup` installs it")
    })
}
