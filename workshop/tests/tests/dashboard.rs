//! The web pages, in a real browser: what they show of real agents, that they move a VM that checks
//! itself, and that they reject all other clients.

use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, TcpStream};
use std::process::{Child, ChildStdout, Stdio};

use api::VmStatus;
use end_to_end::browser::{Browser, ask};
use end_to_end::simulated::Simulated;
use end_to_end::{Side, World, bare, until};
use lab::hosts::{Host, Link, RUN_DIR};
use marks::runs;
use serde_json::json;

const PORT: u16 = 7880;
const EVIL: &str = "<script>document.title='broken'</script>";

/// `droveway dashboard`, running.
struct Dashboard {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Dashboard {
    /// Starts it on host A, with its agent's socket or another one.
    fn start(world: &World, more: &[&str]) -> Self {
        let mut command = world.agent(Side::A).command(world.host(Side::A), &["dashboard"]);
        let mut child = command.args(more).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Self { child, lines }
    }

    /// The next address in its output.
    fn address(&mut self) -> String {
        let mut line = String::new();
        assert_ne!(self.lines.read_line(&mut line).unwrap(), 0, "it has ended");
        line.trim().to_owned()
    }
}

impl Drop for Dashboard {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The status of an answer to another client than the browser.
fn status(host: &Host, method: &str, path: &str, headers: &str) -> u16 {
    let stream = host.within(|| TcpStream::connect((Ipv4Addr::LOCALHOST, PORT))).unwrap();
    ask(&stream, method, path, headers, "").0
}

/// Opens the printed address; returns the address of the pages.
fn enter(browser: &Browser<'_>, address: &str) -> String {
    browser.open(address);
    browser.wait("the first page", "document.querySelector('#hosts')");
    browser.address()
}

/// By hand: from the list of VMs to the form for one.
fn ask_to_move(browser: &Browser<'_>) {
    browser.click("nav a[href=vms]");
    browser.wait("the VM can move", "document.querySelector(\"a[href*='vm=web1']\")");
    browser.click("a[href*='vm=web1']");
    browser.wait("a form", "document.querySelector('#to')");
    browser.type_into("#to", "host-b");
    browser.click("form[action=move] button");
}

fn wait_status(browser: &Browser<'_>, text: &str) {
    let status = "document.querySelector('#status').innerText";
    browser.wait(text, &format!("{status}.includes({})", json!(text)));
}

#[runs(promised)]
#[test]
fn a_vm_is_moved_by_a_form_and_its_downtime_is_in_the_history() {
    let world = World::new(Link::one(100));
    let host = world.host(Side::A);
    let guest = world.boot(&bare("128M", 100_000));
    let mut dashboard = Dashboard::start(&world, &[]);
    let Some(browser) = Browser::start(host) else { return };
    let address = dashboard.address();
    let home = enter(&browser, &address);
    browser.wait("both hosts", "document.querySelectorAll('#hosts tbody tr').length === 2");
    browser.wait("room", "/host-b.*0.*[MG]iB/s.test(document.querySelector('#hosts').innerText)");

    browser.open(&home);
    assert_eq!(browser.focus_after_tabs(1), "Skip to the content");

    // A move that is cancelled, slow enough for that.
    world.hosts.slow(host, 4).unwrap();
    let pid = world.vm(Side::A, "web1").unwrap().pid;
    ask_to_move(&browser);
    browser.wait("it moves", "document.querySelector('article h3')?.innerText === 'web1'");
    browser.wait("its rates", "document.querySelector('.rates polyline')");
    browser.click("form[action=cancel] button");
    wait_status(&browser, "No migration runs. The last to end: web1 stays at host-a");
    world.hosts.unslow(host).unwrap();
    world.assert_intact(&guest);
    let its = || world.vm(Side::A, "web1").map(|vm| (vm.pid, vm.migration));
    until("it may move again", || its() == Some((pid, None)));

    guest.expect_on(world.host(Side::B)).unwrap();
    ask_to_move(&browser);
    wait_status(&browser, "The last to end: web1 moved to host-b, downtime");
    browser.click("nav a[href=history]");
    let row = "document.querySelector('#history-table tbody tr')";
    browser.wait("a row", row);
    let cells = browser.run(&format!("return [...{row}.cells].slice(0, 5).map(c => c.innerText)"));
    assert_eq!(cells[0], "web1");
    assert_eq!(
        (&cells[1], &cells[2], &cells[3]),
        (&json!("host-a"), &json!("host-b"), &json!("moved"))
    );
    let downtime = cells[4].as_str().unwrap();
    assert!(downtime.ends_with("ms") || downtime.ends_with(" s"), "{cells}");
    let its = || world.vm(Side::B, "web1").map(|vm| (vm.status, vm.migration));
    until("it runs there", || its() == Some((VmStatus::Running, None)));
    world.assert_intact(&guest);
    browser.click("#history-table tbody a");
    browser.wait("the report", "document.body.innerText.includes('web1 moved to host-b')");

    // And back, from a host whose own agent is not asked: by a plan, as a gang.
    guest.expect_on(host).unwrap();
    browser.open(&format!("{home}evacuate?host=host-b"));
    browser.wait("a picture", "document.querySelectorAll('.plan .band').length === 1");
    browser.click("form[action=evacuate][method=post] button");
    wait_status(&browser, "The last to end: web1 moved to host-a, downtime");
    browser.open(&format!("{home}history"));
    assert_eq!(browser.run(&format!("return /gang g[0-9a-f]{{8}}/.test({row}.innerText)")), true);
    until("it has left", || world.vms(Side::B).is_empty());
    world.assert_intact(&guest);

    // The address has been used. The next one is printed, and nothing else gives access.
    let path = address.strip_prefix(&format!("http://127.0.0.1:{PORT}")).unwrap();
    assert_eq!(status(host, "GET", path, ""), 403);
    let place = home.strip_prefix(&format!("http://127.0.0.1:{PORT}")).unwrap();
    assert_eq!(status(host, "GET", place, ""), 403);
    assert_eq!(status(host, "POST", &format!("{place}cancel"), ""), 403);
    assert_eq!(status(host, "GET", path, "Host: evil.example\r\n"), 403);
    browser.open(&home);
    let without_token = "return fetch('cancel', { method: 'POST', \
                         body: new URLSearchParams({ id: '0', agent: '0' }) }).then(a => a.status)";
    assert_eq!(browser.run(without_token), 403);
    assert_ne!(dashboard.address(), address);
}

/// When parts of it are replaced, and when no answer comes.
fn the_page_keeps_the_focus_and_tells_that_it_is_old(browser: &Browser<'_>) {
    let scrolled = "document.querySelector('#hosts .scroll')";
    // A part that differs from the next answer is replaced by it.
    let change = format!("{scrolled}.focus(); document.querySelector('#hosts').append('changed')");
    let _ = browser.run(&change);
    let replaced = "!document.querySelector('#hosts').innerText.includes('changed')";
    browser.wait("it is replaced", replaced);
    assert_eq!(browser.run(&format!("return document.activeElement === {scrolled}")), true);
    let silence = "window.fetch = (_, { signal }) => new Promise((_, fail) => \
                   signal?.addEventListener('abort', () => fail(signal.reason)))";
    let _ = browser.run(silence);
    browser.wait("it tells that it is old", "!document.querySelector('#connection').hidden");
}

#[test]
fn a_hundred_hosts_with_a_thousand_vms_are_shown_and_filtered_and_no_name_is_markup() {
    let world = World::new(Link::one(1000));
    let host = world.host(Side::A);
    Simulated::new(100, 10, EVIL).serve(&host.run_dir.join("simulated.sock"));
    let socket = format!("{RUN_DIR}/simulated.sock");
    let mut dashboard = Dashboard::start(&world, &["--api", &socket]);
    let Some(browser) = Browser::start(host) else { return };
    let home = enter(&browser, &dashboard.address());
    browser.wait("all hosts", "document.querySelectorAll('#hosts .bar').length === 100");
    assert_eq!(
        browser.run("return document.querySelectorAll('.tile .value')[1].innerText"),
        "1000"
    );
    the_page_keeps_the_focus_and_tells_that_it_is_old(&browser);
    browser.click("nav a[href=vms]");
    let shown =
        "[...document.querySelectorAll('#vm-table tbody tr')].filter(r => !r.hidden).length";
    browser.wait("all VMs", &format!("{shown} === 1000"));
    browser.type_into("#q", "host-42 script");
    browser.wait("one VM", &format!("{shown} === 1"));
    assert_eq!(browser.run("return document.querySelector('#found').innerText"), "1 of 1000");
    let name = "[...document.querySelectorAll('#vm-table tbody tr')].find(r => !r.hidden).cells[0]";
    assert_eq!(browser.run(&format!("return {name}.innerText")), EVIL);
    browser.click("#vm-table tr:not([hidden]) a[href^='move']");
    browser.wait("a form", "document.querySelector('#to')");
    assert_eq!(
        browser.run("return document.querySelector('h1').innerText"),
        format!("Move {EVIL}")
    );

    browser.open(&format!("{home}evacuate?host=host-0"));
    browser.wait("a picture", "document.querySelectorAll('.plan .band').length === 10");
    assert_eq!(browser.run("return document.querySelectorAll('#plan tbody tr').length"), 10);
    assert_eq!(browser.run("return document.scripts.length"), 1);
    assert_ne!(browser.run("return document.title"), "broken");
    for (scheme, width) in [("light", 1280), ("dark", 390)] {
        browser.emulate(scheme, width);
        for page in ["", "vms", "host?name=host-0", "evacuate?host=host-0", "history"] {
            browser.open(&format!("{home}{page}"));
            // Tables scroll within themselves.
            let wide = "return document.documentElement.scrollWidth - innerWidth";
            let wide = browser.run(wide).as_i64().unwrap();
            assert!(wide <= 0, "{page} is {wide} wider than a screen of {width}");
        }
    }
    assert_eq!(browser.errors(), Vec::<String>::new());

    browser.set_scripts(false);
    browser.open(&format!("{home}vms?q=host-7+vm-7-3"));
    browser.set_scripts(true);
    assert_eq!(browser.run("return document.querySelectorAll('#vm-table tbody tr').length"), 1);
}
