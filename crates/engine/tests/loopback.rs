//! Migrations over loopback, with a real QEMU at both ends and no guest but its firmware: how the
//! two sides fit together. What guests see is tested end to end, in `workshop/tests/`.

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use api::{MigrateRequest, Outcome, Phase, Progress, Report, TapChoice};
use engine::{
    Arriving, Host, Local, Migrated, Peer, Refusal, Resources, SameHost, Settlement, SourceVm,
    Unsettled, Watch,
};
use identity::{Authority, CertificateRequest, Identity, Security, Subject};
use parking_lot::Mutex;
use qemu::disks::GoesOn;
use qemu::machine::{By, GuestPort, Machine, Start, UP_MAX, start};
use qemu::programs::Programs;
use switchover::MigrationId;
use switchover::journal::JournalDir;
use test_scope::TestDir;

fn qemu() -> String {
    std::env::var("DROVEWAY_QEMU").unwrap_or_else(|_| "qemu-system-x86_64".to_owned())
}

fn argv() -> Vec<String> {
    let rest = "-machine q35,accel=tcg -m 160 -nodefaults -display none -vga std";
    std::iter::once(qemu()).chain(rest.split(' ').map(str::to_owned)).collect()
}

fn boot(dir: &Path, incoming: bool) -> Arc<Machine> {
    let argv = argv();
    let started = Start {
        name: "vm",
        argv: &argv,
        cwd: dir,
        dir,
        incoming,
        machine: None,
        by: By::Operator,
        user: None,
        guest_port: GuestPort::None,
        knows_legacy_ack: false,
        up_max: UP_MAX,
        idle_max: UP_MAX,
    };
    Arc::new(start(&started).unwrap())
}

/// How a host treats an arriving VM.
#[derive(Clone, Copy)]
enum Does {
    Takes,
    Refuses(&'static str),
    /// Its agent is stopping.
    Stops,
    /// It knows no other host.
    KnowsNone,
    /// It panics when the VM has become its own.
    Fails,
    /// It compares disks until the source no longer waits. Meanwhile the operator cancels.
    Compares,
}

struct TestHost {
    dir: PathBuf,
    does: Does,
    here: Arc<Mutex<Option<Arc<Machine>>>>,
    taken_up: Sender<String>,
    watch: Arc<Watch>,
}

/// Its QEMU ends with it, unless it is settled here: as with an agent's.
struct TestArrival {
    machine: Arc<Machine>,
    here: Arc<Mutex<Option<Arc<Machine>>>>,
    fails: bool,
    is_settled: bool,
}

impl Host for TestHost {
    fn receive(
        &self,
        _: &wire::Prepare,
        goes_on: GoesOn<'_>,
    ) -> Result<Box<dyn Arriving>, Refusal> {
        match self.does {
            Does::Refuses(why) => return Err(Refusal(why.to_owned())),
            Does::Compares => {
                self.watch.cancel();
                while goes_on().is_ok() {
                    std::thread::yield_now();
                }
                let _ = self.taken_up.send("given up".to_owned());
                return Err(Refusal("the source no longer waits".to_owned()));
            }
            Does::Takes | Does::Stops | Does::KnowsNone | Does::Fails => {}
        }
        let machine = boot(&self.dir, true);
        let fails = matches!(self.does, Does::Fails);
        let here = Arc::clone(&self.here);
        Ok(Box::new(TestArrival { machine, here, fails, is_settled: false }))
    }

    fn settle(&self, left: Unsettled) {
        panic!("nothing was cut off: {:?}", left.driver);
    }

    fn take_up(&self, vm: &str, _: &MigrationId) -> bool {
        self.taken_up.send(vm.to_owned()).is_ok()
    }

    fn admits(&self, _: &str) -> bool {
        !matches!(self.does, Does::KnowsNone)
    }

    /// Answers as a host that has no journal.
    fn answer(&self, inquiry: wire::Inquiry) -> Option<wire::SwitchoverMessage> {
        inquiry.message.answer_without_journal()
    }
}

impl Arriving for TestArrival {
    fn machine(&self) -> Arc<Machine> {
        Arc::clone(&self.machine)
    }

    fn images(&self) -> &[qemu::disks::PreparedImage] {
        &[]
    }

    fn source_address(&self) -> Option<SocketAddr> {
        None
    }

    fn adopt(&mut self) -> Result<(), String> {
        *self.here.lock() = Some(Arc::clone(&self.machine));
        assert!(!self.fails, "as a test wants it");
        Ok(())
    }

    fn runs(&self) {}

    fn settled(mut self: Box<Self>) {
        self.is_settled = true;
    }

    fn discard(self: Box<Self>) {}
}

impl Drop for TestArrival {
    fn drop(&mut self) {
        if !self.is_settled {
            let ended = self.machine.quit();
            // A second panic would end the tests.
            assert!(std::thread::panicking() || ended.is_ok(), "{ended:?}");
        }
    }
}

struct Ended {
    report: Report,
    /// Journals that are left at either end.
    journals: usize,
    source: Arc<Machine>,
    destination: Option<Arc<Machine>>,
    taken_up: Receiver<String>,
    _dir: TestDir,
}

/// How the two hosts identify themselves.
enum Known {
    /// Without certificates.
    Plain,
    /// With certificates; the source orders in this host's name.
    By(&'static str),
    /// They are one.
    Same,
}

/// A host with a certificate of the CA in `dir`.
fn secured(dir: &Path, name: &str) -> Security {
    let ca = dir.join("ca");
    if !ca.exists() {
        Authority::create(&ca, 1).unwrap();
    }
    let authority = Authority::open(&ca).unwrap();
    let subject = Subject::host(name).unwrap();
    let request = CertificateRequest { out: dir.join(name), subject, days: 1, replace: false };
    let files = authority.issue(&request).unwrap().files;
    Security::Tls(Arc::new(Identity::load(name, &files).unwrap()))
}

fn migrate(tap: TapChoice, does: Does, known: &Known) -> Ended {
    let dir = TestDir::new();
    let (name, security) = match known {
        Known::Plain | Known::Same => ("host-a", [Security::Plaintext, Security::Plaintext]),
        Known::By(name) => (*name, ["host-a", "host-b"].map(|host| secured(dir.path(), host))),
    };
    let [ours, theirs] = security;
    let sub = |name: &str| {
        let path = dir.path().join(name);
        std::fs::create_dir(&path).unwrap();
        path
    };
    let journals = JournalDir::open(&dir.path().join("journals")).unwrap();
    let local = |agent: &str, security, scratch| Local {
        agent: agent.to_owned(),
        security,
        nics: Vec::new(),
        resources: Resources::new(128 << 20, Vec::new()),
        programs: Arc::new(Programs::usual(None)),
        scratch,
        fixed_cost: Arc::default(),
        journals: journals.clone(),
        quota_notes: None,
        agent_port: 7800,
        cpu_floor: api::CpuFloor::ALL,
        waits: engine::Waits::default(),
        sharing: None,
        manager: None,
        xen: None,
    };
    let here = Arc::new(Mutex::new(None));
    let (tell, taken_up) = channel();
    let watch = Arc::new(Watch::new(progress(), api::Bounds::default()));
    let host = TestHost {
        dir: sub("b"),
        does,
        here: Arc::clone(&here),
        taken_up: tell,
        watch: Arc::clone(&watch),
    };
    let source = boot(&sub("a"), false);
    let request: MigrateRequest = serde_json::from_value(serde_json::json!({
        "vm": "vm", "to": "host-b", "tap": tap, "accept_lost_writes": true,
    }))
    .unwrap();
    let vm = SourceVm {
        name: "vm".to_owned(),
        machine: Arc::clone(&source),
        cwd: "/".to_owned(),
        share_domain: engine::Domain::default(),
        hand_over: None,
    };
    let local_a = local(name, ours, sub("a-scratch"));
    let migrated = if matches!(known, Known::Same) {
        let same = SameHost::new(Arc::new(host), &local_a);
        // Nothing listens there.
        let address = ([127, 0, 0, 1], 1).into();
        let peer = Peer { name: "host-a".to_owned(), address, nics: Vec::new() };
        let migrated = engine::migrate(same.source(), &peer, vm, &request, &watch);
        same.wait_ended();
        migrated
    } else {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let local_b = local("host-b", theirs, sub("b-scratch"));
        let server = engine::serve(listener, [], Arc::new(host), local_b).unwrap();
        if matches!(does, Does::Stops) {
            assert_eq!(server.wait_postcopies(Instant::now()), 0);
        }
        let peer = Peer { name: "host-b".to_owned(), address: server.address(), nics: Vec::new() };
        engine::migrate(&local_a, &peer, vm, &request, &watch)
    };
    let Migrated { report, settlement } = migrated;
    assert!(matches!((does, settlement), (Does::Fails, _) | (_, Settlement::Settled)));
    let journals = journals.contents().unwrap().len();
    let destination = here.lock().take();
    Ended { report, journals, source, destination, taken_up, _dir: dir }
}

fn progress() -> Progress {
    serde_json::from_value(serde_json::json!({
        "id": "test", "vm": "vm", "from": "host-a", "to": "host-b", "phase": "prepare",
        "elapsed_s": 0.0, "ram_bytes": 0, "percent": 0.0, "delivered_bytes_per_s": 0.0,
        "wire_bytes_per_s": 0.0, "dirty_bytes_per_s": 0.0, "pass": 0, "left_bytes": 0,
        "time_left_s": null, "limit": "unknown", "notes": [], "outcome": null,
    }))
    .unwrap()
}

fn status(machine: &Machine) -> String {
    machine.qmp.run_state().unwrap().to_string()
}

#[test]
fn a_vm_moves_by_each_kind_of_stream() {
    let ways = [
        (TapChoice::Multifd, Known::Plain),
        (TapChoice::Classic, Known::Plain),
        (TapChoice::Multifd, Known::By("host-a")),
        (TapChoice::Multifd, Known::Same),
        (TapChoice::Classic, Known::Same),
    ];
    for (tap, known) in ways {
        let ended = migrate(tap, Does::Takes, &known);
        let report = ended.report;
        assert_eq!(report.outcome, Outcome::Done, "{report:#?}");
        assert_eq!(report.phases.last().unwrap().phase, Phase::Running);
        assert_eq!(report.placement, "mapped");
        assert!(!ended.source.process.is_alive());
        assert_eq!(ended.journals, 0);
        let destination = ended.destination.unwrap();
        assert_eq!(status(&destination), "running");
        destination.quit().unwrap();
    }
}

#[test]
fn a_vm_that_is_refused_goes_on() {
    for known in [Known::Plain, Known::Same] {
        stays(Does::Refuses("no room"), &known, "no room");
    }
}

#[test]
fn a_host_whose_agent_is_stopping_takes_no_vm() {
    stays(Does::Stops, &Known::Plain, "its agent is stopping");
}

#[test]
fn an_order_in_another_hosts_name_is_refused() {
    stays(
        Does::Takes,
        &Known::By("host-c"),
        "is from host-c, and the certificate of its sender is for host-a",
    );
}

#[test]
fn a_host_that_is_not_in_the_peers_file_sends_no_vm() {
    let why = "host-a is not in the peers file of host-b";
    stays(Does::KnowsNone, &Known::By("host-a"), why);
}

/// Comparing disks by their content takes as long as reading them.
#[test]
fn a_destination_that_compares_disks_learns_that_the_move_was_cancelled() {
    let ended = migrate(TapChoice::Auto, Does::Compares, &Known::Plain);
    assert_eq!(ended.report.outcome, Outcome::Cancelled);
    let given_up = ended.taken_up.recv_timeout(Duration::from_secs(20));
    assert_eq!(given_up.as_deref(), Ok("given up"));
    assert_eq!(status(&ended.source), "running");
    assert_eq!(ended.journals, 0);
    ended.source.quit().unwrap();
}

/// The destination's thread panics when the VM is loaded and given up: the VM is not ended, and the
/// host is asked to continue from the journal.
#[test]
fn a_fault_at_the_destination_leaves_the_vm_to_its_journal() {
    let ended = migrate(TapChoice::Auto, Does::Fails, &Known::Plain);
    let taken_up = ended.taken_up.recv_timeout(Duration::from_secs(20));
    assert_eq!(taken_up.as_deref(), Ok("vm"));
    assert!(ended.journals > 0);
    let destination = ended.destination.unwrap();
    assert_eq!(status(&destination), "running");
    destination.quit().unwrap();
    // The source gave the VM up, and may or may not have received `running`.
    let _ = ended.source.quit();
}

fn stays(does: Does, known: &Known, why: &str) {
    let ended = migrate(TapChoice::Auto, does, known);
    let Outcome::Failed(reason) = &ended.report.outcome else { panic!("{:?}", ended.report) };
    assert!(reason.contains(why) && reason.contains("stays"), "{reason}");
    assert!(!ended.report.in_doubt);
    assert_eq!(status(&ended.source), "running");
    assert!(ended.destination.is_none());
    assert_eq!(ended.journals, 0);
    ended.source.quit().unwrap();
}

/// A message about a switchover counts as its host's.
#[test]
fn a_message_about_a_switchover_in_another_hosts_name_is_refused() {
    use switchover::{Envelope, MigrationId, ToSource};
    use wire::{Frame, Inquiry, Kind, SwitchoverMessage, read_frame};

    let dir = TestDir::new();
    let [ours, theirs] = ["host-a", "host-b"].map(|host| secured(dir.path(), host));
    let here = Arc::new(Mutex::new(None));
    let taken_up = channel().0;
    let watch = Arc::new(Watch::new(progress(), api::Bounds::default()));
    let host = TestHost { dir: dir.path().to_owned(), does: Does::Takes, here, taken_up, watch };
    let local = Local {
        agent: "host-b".to_owned(),
        security: theirs,
        nics: Vec::new(),
        resources: Resources::new(128 << 20, Vec::new()),
        programs: Arc::new(Programs::usual(None)),
        scratch: dir.path().to_owned(),
        fixed_cost: Arc::default(),
        journals: JournalDir::open(&dir.path().join("journals")).unwrap(),
        quota_notes: None,
        agent_port: 1,
        cpu_floor: api::CpuFloor::ALL,
        waits: engine::Waits::default(),
        sharing: None,
        manager: None,
        xen: None,
    };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let server = engine::serve(listener, [], Arc::new(host), local).unwrap();
    let endpoint = engine::Endpoint { local: None, remote: server.address() };
    let ask = |from: &str| {
        let mut connection = transport::connect(endpoint, "host-b", &ours, Kind::Inquiry).unwrap();
        let migration = MigrationId::new("m1").unwrap();
        let message =
            SwitchoverMessage::ToSource(Envelope { migration, message: ToSource::Running });
        let inquiry = Inquiry { from: from.to_owned(), message };
        Frame::message(&inquiry).unwrap().write_to(&mut connection).unwrap();
        matches!(read_frame(&mut connection), Ok(Some(Frame::Message(_))))
    };
    assert!(ask("host-a"));
    assert!(!ask("host-c"));
}
