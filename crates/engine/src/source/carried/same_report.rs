//! The same events of a stream give the same report, whichever program commands its QEMU.

use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use api::{Audit, Bounds, Outcome, Progress, Report};
use crossbeam_channel::unbounded;
use data_threads::DataThreads;
use identity::{Connection, Security};
use page::{Batch, Encoding, Epoch, PAGE_BYTES, PageIndex, Pool, Reserve, SLOT_BYTES};
use qemu::ram_blocks::RamBlocks;
use tap::{Block, Head, Output, Taken, Tap};
use transport::LanesPlan;
use wire::{ToDestination, ToSource, Token};

use super::observed::Observed;
use super::passes::{Order, Passes};
use super::tail::Tail;
use super::way_back::WayBack;
use crate::link::Link;
use crate::network::Network;
use crate::report_builder::ReportBuilder;
use crate::resources::{Pools, Resources};
use crate::source::audit::{Compared, SourceAudit};
use crate::source::bounds::bounded_threads;
use crate::source::collector::Collector;
use crate::source::control::stream_state::{HIDDEN_BYTES, StreamState, Traits};
use crate::source::flow::{Flow, FlowPlan};
use crate::source::own::Own;
use crate::watch::Watch;

const PAGES: u64 = 512;

/// The parts of a migration that both kinds have.
struct Parts {
    pools: Pools,
    state: Arc<StreamState>,
    network: Arc<Network>,
    link: Arc<Link<ToDestination>>,
    threads: Arc<DataThreads>,
    report_builder: Arc<ReportBuilder>,
    audit: SourceAudit,
}

impl Parts {
    fn new() -> Self {
        let resources = Resources::new(64 << 20, Vec::new());
        let (pools, network) = (resources.leaving(false).unwrap(), Arc::clone(&resources.network));
        let traits = Traits { hidden_bytes: HIDDEN_BYTES, told_limit: false, held: false };
        let state = Arc::new(StreamState::new(&pools, Duration::from_millis(300), traits));
        let progress = Progress::new(("deadbeef", "web1"), ("host-a", "host-b"), 0);
        let watch = Arc::new(Watch::new(progress, Bounds::default()));
        let report_builder = Arc::new(ReportBuilder::new(watch, 300));
        let threads = bounded_threads(&report_builder, &unbounded().0);
        let audit = (Audit::On, "it is turned off");
        let audit = SourceAudit::new(audit, None, "host-b", &report_builder).unwrap();
        Self { pools, state, network, link: link(), threads, report_builder, audit }
    }

    /// Follows the events of one migration.
    fn report(mut self, output: impl FnOnce(Collector) -> Arc<dyn Output>) -> Report {
        // No lane takes anything.
        let lanes = LanesPlan {
            endpoints: Vec::new(),
            peer: "host-b".to_owned(),
            security: Security::Plaintext,
            token: Token([1; 16]),
            encoding: Encoding::Raw,
            stale_filter: None,
            deltas: None,
        };
        let plan = FlowPlan {
            state: Arc::clone(&self.state),
            lanes,
            naming: None,
            handed_over: self.audit.handed_over(),
            link: &self.link,
            network: &self.network,
            notices: &unbounded().0,
            threads: &self.threads,
            report_builder: &self.report_builder,
        };
        let mut events = None;
        let (flow, _tap) = Flow::start(plan, |collector| {
            let output = output(collector);
            events = Some(Arc::clone(&output));
            // Its QEMU sends nothing; the events are below.
            let taken = Taken {
                main: UnixStream::pair().unwrap().0,
                before: Vec::new(),
                channels: Vec::new(),
            };
            Ok(Tap::of_taken(taken, Pool::new(SLOT_BYTES), output).unwrap())
        })
        .unwrap();
        self.stream(&*events.unwrap());
        assert_eq!(self.audit.begin().len(), 1);
        for audited in [false, true] {
            let said = if audited {
                ToSource::Audited { reread_pages: 0 }
            } else {
                ToSource::AuditDigests { block: 0, first: 0, digests: Vec::new(), more: true }
            };
            let compared = self.audit.receive(&said).unwrap();
            assert_eq!(matches!(compared, Some(Compared::Same)), audited);
            assert_eq!(self.audit.is_open(), !audited);
        }
        let mapped = vec!["pc.ram".to_owned()];
        assert!(flow.receive(ToSource::Placement { mapped, inline: Vec::new() }).is_none());
        flow.tap.cut();
        flow.lanes.stop();
        flow.account(&self.pools, self.link.wire_bytes());
        self.report_builder.end(Outcome::Done)
    }

    /// What QEMU sends: some pages, one of them twice, and devices.
    fn stream(&self, output: &dyn Output) {
        let blocks = vec![Block { name: "pc.ram".to_owned(), bytes: PAGES * PAGE_BYTES as u64 }];
        output
            .head(Head {
                bytes: vec![7; 100],
                blocks,
                ram_section: 3,
                footers: true,
                epoch_by_section: false,
                may_turn_to_postcopy: false,
            })
            .unwrap();
        let mut first = self.batch(1);
        first.push_body(PageIndex(1), 0);
        first.push_body(PageIndex(2), PAGE_BYTES);
        first.push_fill(PageIndex(3), 0);
        first.push_fill(PageIndex(4), 0);
        let mut later = self.batch(2);
        later.push_body(PageIndex(1), 0);
        for batch in [first, later] {
            let epoch = batch.epoch;
            output.arrived(&batch, 0);
            output.batch(batch).unwrap();
            output.all_before(Epoch(epoch.0 + 1));
        }
        output.tail(b"de").unwrap();
        output.ram_over();
        output.tail(b"vices").unwrap();
    }

    fn batch(&self, epoch: u32) -> Batch {
        let mut batch = self.state.pool.take().unwrap();
        batch.epoch = Epoch(epoch);
        batch.buffer_mut()[..2 * PAGE_BYTES].fill(9);
        batch
    }
}

/// A link whose peer reads everything.
fn link() -> Arc<Link<ToDestination>> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (mut peer, _) = listener.accept().unwrap();
    thread::spawn(move || io::copy(&mut peer, &mut io::sink()));
    let (link, _) = Link::start::<ToSource>(Connection::plain(stream), "peer").unwrap();
    Arc::new(link)
}

#[test]
fn the_same_events_give_the_same_report() {
    let own = Parts::new().report(|collector| {
        Arc::new(Own {
            collector,
            ram: RamBlocks::default(),
            numbered: Arc::default(),
            global_state: Arc::default(),
        })
    });
    let carried = Parts::new().report(|collector| {
        Arc::new(Observed {
            collector,
            tail: Arc::new(Tail::new(&Reserve::new(0))),
            passes: Arc::new(Passes::new(Order::Pages)),
            way_back: Arc::new(WayBack::new(UnixStream::pair().unwrap().0)),
            fixed: Duration::ZERO,
            first_swept: false.into(),
            ram_over: false.into(),
        })
    });
    let page = PAGE_BYTES as u64;
    assert_eq!((own.body_bytes, own.fill_bytes, own.residue_bytes), (3 * page, 2 * page, 7));
    assert_eq!(own.ram_bytes, PAGES * page);
    assert!(own.wire_bytes > 0 && own.placement == "mapped");
    // What depends on the clock.
    let same = |mut report: Report| {
        (report.cpu_source_s, report.total_s, report.started_unix_s) = (0.0, 0.0, 0);
        serde_json::to_value(report).unwrap()
    };
    assert_eq!(same(own), same(carried));
}
