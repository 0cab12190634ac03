//! A simulated agent: it answers the API with any number of hosts and VMs that don't exist.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::thread;

use api::{
    Evacuation, GangPlan, GangRequest, GangStarted, HostCensus, HostInfo, HostRoom, HostVm,
    PeerInfo, PlannedMove, VmStatus,
};
use serde_json::{Value, json};

const GIB: u64 = 1 << 30;

/// The hosts of a cluster; the agent of the first one, `host-0`, answers at the socket.
#[derive(Debug)]
pub struct Simulated {
    hosts: Vec<HostCensus>,
}

impl Simulated {
    /// A cluster of `hosts` hosts with `vms` VMs each. The first VM of each has the name `first`.
    #[must_use]
    pub fn new(hosts: usize, vms: usize, first: &str) -> Self {
        let vm = |host: usize, n: usize| HostVm {
            name: if n == 0 { first.to_owned() } else { format!("vm-{host}-{n}") },
            status: VmStatus::Running,
            migration: None,
            ram_bytes: (n as u64 % 4 + 1) * GIB,
            used_bytes: GIB / 2,
            vcpus: 2,
            program_replaced: false,
        };
        let host = |host: usize| HostCensus {
            name: format!("host-{host}"),
            rack: Some(format!("rack-{}", host / 20)),
            free_bytes: Some((20 + host as u64 * 7 % 60) * GIB),
            vms: (0..vms).map(|n| vm(host, n)).collect(),
            moving: Vec::new(),
        };
        Self { hosts: (0..hosts).map(host).collect() }
    }

    /// Answers until the program ends.
    ///
    /// # Panics
    /// If the socket can't be made.
    pub fn serve(self, socket: &Path) {
        let listener = UnixListener::bind(socket).unwrap();
        let simulated = Arc::new(self);
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let simulated = Arc::clone(&simulated);
                // The client may leave before the answer.
                thread::spawn(move || drop(simulated.answer(&stream)));
            }
        });
    }

    fn answer(&self, mut stream: &UnixStream) -> std::io::Result<()> {
        let mut reader = BufReader::new(stream);
        let mut head = String::new();
        while reader.read_line(&mut head)? > 2 {}
        let length = head.lines().find_map(|line| {
            let (name, value) = line.split_once(": ")?;
            name.eq_ignore_ascii_case("content-length").then(|| value.parse::<usize>().ok())?
        });
        let mut body = vec![0; length.unwrap_or(0)];
        reader.read_exact(&mut body)?;
        let mut words = head.split(' ');
        let (method, path) = (words.next().unwrap_or(""), words.next().unwrap_or(""));
        let (status, value) = self.said(method, path, &body);
        let json = value.to_string();
        let mut out = String::new();
        let _ = write!(out, "HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n");
        let _ = write!(out, "Content-Length: {}\r\nConnection: close\r\n\r\n{json}", json.len());
        stream.write_all(out.as_bytes())
    }

    fn said(&self, method: &str, path: &str, body: &[u8]) -> (u16, Value) {
        let host = |name: &str| self.hosts.iter().find(|host| host.name == name);
        match (method, path) {
            ("GET", "/v1/host") => (200, json!(self.info())),
            ("GET", "/v1/migrations" | "/v1/gangs") => (200, json!([])),
            ("POST", "/v1/gangs") => match serde_json::from_slice::<GangRequest>(body) {
                Ok(GangRequest {
                    evacuate: Some(Evacuation { host, .. }), dry_run: true, ..
                }) => (201, json!(GangStarted { id: None, plan: self.plan(&host) })),
                _ => (409, json!({ "error": "it is simulated", "code": "conflict" })),
            },
            _ => match path.strip_prefix("/v1/hosts/").and_then(host) {
                Some(census) => (200, json!(census)),
                None => (404, json!({ "error": "no such path", "code": "no-such-path" })),
            },
        }
    }

    fn info(&self) -> HostInfo {
        let peer = |host: &HostCensus| PeerInfo {
            name: host.name.clone(),
            rack: host.rack.clone(),
            address: "127.0.0.1:7800".to_owned(),
        };
        HostInfo {
            name: self.hosts[0].name.clone(),
            rack: self.hosts[0].rack.clone(),
            version: "0".to_owned(),
            pid: 1,
            listen: "127.0.0.1:7800".to_owned(),
            nics: Vec::new(),
            peers: self.hosts[1..].iter().map(peer).collect(),
        }
    }

    /// Spreads the VMs over four other hosts, in turn.
    fn plan(&self, from: &str) -> GangPlan {
        let others: Vec<&HostCensus> =
            self.hosts.iter().filter(|host| host.name != from).take(4).collect();
        let leaving = self.hosts.iter().find(|host| host.name == from);
        let moves = leaving.into_iter().flat_map(|host| &host.vms).zip(others.iter().cycle());
        let moves = moves.map(|(vm, to)| PlannedMove {
            vm: vm.name.clone(),
            from: from.to_owned(),
            to: to.name.clone(),
            ram_bytes: vm.ram_bytes,
            used_bytes: vm.used_bytes,
            shared_bytes: None,
            shared: None,
            limit_bits_per_s: None,
        });
        let moves: Vec<PlannedMove> = moves.collect();
        let room = |host: &&HostCensus| {
            let free = host.free_bytes.unwrap_or(0);
            let come = moves.iter().filter(|one| one.to == host.name).map(|one| one.ram_bytes);
            let left_bytes = free.saturating_sub(come.sum());
            HostRoom { host: host.name.clone(), free_bytes: free, left_bytes }
        };
        let rooms = others.iter().map(room).collect();
        GangPlan { moves, rooms, notes: vec!["nothing of this exists".to_owned()] }
    }
}
