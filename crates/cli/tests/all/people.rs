//! The API over TCP: which people may use it, and for what.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::host::{self, Hosts, text};

const DROVEWAY: &str = env!("CARGO_BIN_EXE_droveway");

/// A host named `localhost`, by which it is reached, with a CA next to it.
struct Site {
    hosts: Hosts,
    port: u16,
}

impl Site {
    fn new() -> Self {
        let mut hosts = Hosts::new(["localhost"]);
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let dir = hosts.dir.path().to_owned();
        certify(&dir.join("ca"), &["init"]);
        certify(&dir.join("ca"), &["issue", "localhost"]);
        let tls = dir.join("ca/hosts/localhost").display().to_string();
        let host = &mut hosts.hosts[0];
        host.end("TERM");
        host.more = ["--tls", &tls, "--api-listen", &format!("127.0.0.1:{port}")]
            .map(str::to_owned)
            .to_vec();
        host.start();
        Self { hosts, port }
    }

    /// Issues a certificate to a person.
    fn person(&self, name: &str, role: &str) -> PathBuf {
        let ca = self.hosts.dir.path().join("ca");
        certify(&ca, &["issue", name, "--role", role]);
        ca.join("clients").join(name)
    }

    /// Runs a command over TCP; returns whether it succeeds, and its output.
    fn asks(&self, tls: &Path, args: &[&str]) -> (bool, String) {
        self.asks_at(&format!("https://localhost:{}", self.port), tls, args)
    }

    fn asks_at(&self, api: &str, tls: &Path, args: &[&str]) -> (bool, String) {
        let output = Command::new(DROVEWAY)
            .args(["--api", api, "--tls"])
            .arg(tls)
            .args(args)
            .output()
            .unwrap();
        (output.status.success(), text(&output.stdout) + &text(&output.stderr))
    }

    fn log(&self) -> String {
        fs::read_to_string(self.hosts.hosts[0].log()).unwrap()
    }

    /// Asserts that a client gets only the reason `says`, and that the agent logs `logs`.
    fn turns_away(&self, tls: &Path, says: &str, logs: &str) {
        let (done, said) = self.asks(tls, &["list"]);
        assert!(!done && said.contains(says), "{said}");
        // The agent logs it just before or just after it closes the connection.
        self.logs(logs);
    }

    /// Waits for a text in the agent's log.
    fn logs(&self, word: &str) {
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while !self.log().contains(word) {
            assert!(std::time::Instant::now() < deadline, "{word:?} is not in: {}", self.log());
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}

fn certify(dir: &Path, args: &[&str]) {
    let output = Command::new(DROVEWAY).arg("ca").args(args).arg("--dir").arg(dir).output();
    let output = output.unwrap();
    assert!(output.status.success(), "{args:?}: {output:?}");
}

#[test]
fn a_role_limits_the_requests() {
    let site = Site::new();
    let [observer, mover, admin] =
        [("olga", "observe"), ("max", "migrate"), ("ann", "admin")].map(|(n, r)| site.person(n, r));
    let qemu = host::qemu();
    let run =
        ["run", "web1", "--", &qemu, "-machine", "q35,accel=tcg", "-nodefaults", "-S", "-m", "32"];
    let run = [&run[..], &["-display", "none"]].concat();
    for (tls, says) in [(&observer, "olga has observe"), (&mover, "max has migrate")] {
        let (done, said) = site.asks(tls, &run);
        assert!(!done && said.contains("needs the role admin") && said.contains(says), "{said}");
    }
    let (done, said) = site.asks(&admin, &run);
    assert!(done, "{said}");
    assert!(site.log().contains("request over TCP who=\"ann\" role=admin"), "{}", site.log());

    let (done, said) = site.asks(&observer, &["list"]);
    assert!(done && said.contains("web1"), "{said}");
    let (done, said) = site.asks(&observer, &["migrate", "web1", "elsewhere"]);
    assert!(!done && said.contains("needs the role migrate"), "{said}");
    let (done, said) = site.asks(&mover, &["migrate", "web1", "elsewhere"]);
    assert!(!done && said.contains("no host `elsewhere`"), "{said}");
    let set = ["migrate", "web1", "elsewhere", "--set", "/bin/qemu=/tmp/mine"];
    let (done, said) = site.asks(&mover, &set);
    assert!(!done && said.contains("--set needs the role admin"), "{said}");
    for admins in [&["stop", "web1", "--force"], &["resolve", "web1", "--here", "--yes"][..]] {
        let (done, said) = site.asks(&mover, admins);
        assert!(!done && said.contains("needs the role admin"), "{said}");
    }
    let (done, said) = site.asks(&admin, &["stop", "web1", "--force"]);
    assert!(done, "{said}");
    // The socket needs no certificate, because only its owner can use it.
    assert!(site.hosts.hosts[0].vms().is_empty());
}

#[test]
fn a_stranger_is_rejected_with_the_reason() {
    let site = Site::new();
    let stranger = site.hosts.dir.path().join("other");
    certify(&stranger, &["init"]);
    certify(&stranger, &["issue", "eve", "--role", "admin"]);
    let stranger = stranger.join("clients/eve");
    site.turns_away(
        &stranger,
        "the peer's certificate is not from a CA that this host knows",
        "the peer doesn't know the CA",
    );
    // A client that trusts the right CA, but whose certificate is from another.
    let ca = site.hosts.dir.path().join("ca/ca.crt");
    fs::copy(ca, stranger.join("ca.crt")).unwrap();
    site.turns_away(
        &stranger,
        "the peer doesn't know the CA of this host's certificate",
        "the peer's certificate is not from a CA that this host knows",
    );
    // A host's certificate is not a person's, and a host can't stand for another.
    let own = site.hosts.dir.path().join("ca/hosts/localhost");
    let (done, said) = site.asks(&own, &["list"]);
    assert!(!done && said.contains("is a host's certificate"), "{said}");
    let ann = site.person("ann", "admin");
    let other = format!("https://LOCALHOST:{}", site.port);
    let (done, said) = site.asks_at(&other, &ann, &["list"]);
    assert!(!done && said.contains("the peer there is host localhost, not"), "{said}");
    assert!(
        said.contains("no secure connection") && !said.contains("lost the connection"),
        "{said}"
    );
    // Nor does the agents' port serve people.
    let agents = site.hosts.hosts[0].listen();
    let agents = agents.replace("127.0.0.1", "https://localhost");
    let (done, said) = site.asks_at(&agents, &ann, &["list"]);
    assert!(!done && said.contains("the peer"), "{said}");
}

/// On SIGHUP, and when the files have changed; a certificate that can't be used is ignored.
#[test]
fn a_certificate_is_read_again_without_a_restart() {
    let site = Site::new();
    let ca = site.hosts.dir.path().join("ca");
    let ann = site.person("ann", "admin");
    let pid = site.hosts.hosts[0].pid();
    let files = ca.join("hosts/localhost");
    let own = fs::read(files.join("droveway.crt")).unwrap();
    let others = fs::read(ann.join("droveway.crt")).unwrap();
    fs::write(files.join("droveway.crt"), others).unwrap();
    host::kill("HUP", pid);
    site.logs("the certificate was not replaced, the previous one is used");
    assert!(site.asks(&ann, &["list"]).0, "as before");
    fs::write(files.join("droveway.crt"), own).unwrap();
    // Without SIGHUP this time.
    certify(&ca, &["issue", "localhost", "--days", "200", "--replace"]);
    site.logs("the certificate was read again");
    let (done, said) = site.asks(&ann, &["list"]);
    assert!(done, "{said}");
    assert!(host::is_alive(pid));
}

/// A person's dashboard, and a browser that was admitted.
struct Pages {
    dashboard: Child,
    address: String,
    cookie: String,
    place: String,
}

impl Pages {
    fn open(site: &Site, tls: &Path) -> Self {
        let api = format!("https://localhost:{}", site.port);
        let mut command = Command::new(DROVEWAY);
        command.args(["--api", &api, "--tls"]).arg(tls);
        // The same agent a second time: its answers are shown only once.
        command.args(["dashboard", "--listen", "127.0.0.1:0", "--agent", &api]);
        let mut dashboard = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(dashboard.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let (address, path) = line.trim().strip_prefix("http://").unwrap().split_once('/').unwrap();
        let address = address.to_owned();
        let mut pages = Self { dashboard, address, cookie: String::new(), place: String::new() };
        let opened = pages.ask("GET", &format!("/{path}"), "");
        let between = |from: &str, to: char| {
            let rest = opened.split_once(from).unwrap_or_else(|| panic!("{opened}")).1;
            rest.split(to).next().unwrap().to_owned()
        };
        (pages.cookie, pages.place) = (between("set-cookie: ", ';'), between("0; url=", '"'));
        pages
    }

    /// The whole response.
    fn ask(&self, method: &str, path: &str, body: &str) -> String {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        let (address, cookie, length) = (&self.address, &self.cookie, body.len());
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: {address}\r\nCookie: {cookie}\r\nContent-Length: \
             {length}\r\nContent-Type: application/x-www-form-urlencoded\r\nConnection: \
             close\r\n\r\n{body}"
        )
        .unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        text(&answer)
    }

    fn page(&self, page: &str) -> String {
        self.ask("GET", &format!("{}{page}", self.place), "")
    }

    /// The page of VMs, once it has web1.
    fn vms(&self) -> String {
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        loop {
            let page = self.page("vms");
            if page.contains("web1") {
                return page;
            }
            assert!(std::time::Instant::now() < deadline, "{page}");
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        let _ = self.dashboard.kill();
        let _ = self.dashboard.wait();
    }
}

#[test]
fn a_dashboard_has_the_forms_that_the_role_allows() {
    let site = Site::new();
    let [observer, mover] =
        [("olga", "observe"), ("max", "migrate")].map(|(n, r)| site.person(n, r));
    site.hosts.hosts[0].run("web1", "");
    let form = "move?from=localhost&amp;vm=web1";

    let pages = Pages::open(&site, &mover);
    let vms = pages.vms();
    assert!(vms.matches(form).count() == 1 && vms.matches("<tr>").count() == 2, "{vms}");
    assert!(pages.page("evacuate?host=localhost").contains("Plan for localhost"));
    let token = pages.page(&form.replace("&amp;", "&"));
    let token = token.split_once("name=\"token\" value=\"").unwrap().1.split('"').next().unwrap();
    let body = format!("token={token}&from=localhost&vm=web1&to=elsewhere");
    let refused = pages.ask("POST", &format!("{}move", pages.place), &body);
    assert!(
        refused.starts_with("HTTP/1.1 409") && refused.contains("no host `elsewhere`"),
        "{refused}"
    );

    let pages = Pages::open(&site, &observer);
    assert!(!pages.vms().contains(form));
    let planned = pages.page("evacuate?host=localhost");
    assert!(planned.contains("needs the role migrate"), "{planned}");
    let refused = pages.ask("POST", &format!("{}move", pages.place), &body);
    assert!(refused.starts_with("HTTP/1.1 403") && refused.contains("change nothing"), "{refused}");
}
