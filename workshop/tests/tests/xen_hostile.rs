//! A host that may send domains breaks the rules: the receiver's agent refuses what it sends, in
//! bounded memory, leaves no copy, and still receives others' domains.

use end_to_end::domains::Domains;
use end_to_end::fake_xl::{made_up, uuid};
use end_to_end::hostile::{Pages, ending, frame, hear, rss_bytes, say};
use end_to_end::{MIB, Side, until};
use identity::Connection;
use lab::hosts::Link;
use serde_json::{Value, json};
use switchover::MigrationId;
use wire::{Frame, Kind, ToSource, Token};
use xen::DomainKind;

const XL: &str = env!("CARGO_BIN_EXE_fake-xl");
/// The domain that never arrives.
const EVIL: &str = "evil";
const PAGES: u32 = 1024;
const RSS_MAX: u64 = 400 * MIB;

fn domains() -> Domains {
    let domains = Domains::new(Link::unshaped(), XL);
    domains.start("web1", DomainKind::Pv);
    domains
}

/// An order as host A's agent sends it.
fn order() -> Value {
    json!({
        "say": "receive-domain",
        "migration": "0badf00d",
        "switchover": MigrationId::random().unwrap(),
        "agent_port": 7800,
        "from": "host-a",
        "domain": EVIL,
        "uuid": uuid(EVIL),
        "pages_max": PAGES,
    })
}

/// Asserts that nothing is left, and that host B's agent still works.
fn assert_unharmed(domains: &Domains) {
    until("nothing of it is left", || domains.copies(Side::B, EVIL).is_empty());
    domains.world.assert_only(Side::B, &[]);
    let bytes = rss_bytes(&domains.world, Side::B);
    assert!(bytes < RSS_MAX, "{bytes} bytes");
    domains.assert_runs_at(Side::A, "web1");
}

#[test]
fn invalid_orders_are_refused() {
    let domains = domains();
    let long = "x".repeat(1 << 20);
    for (part, value) in [
        ("domain", json!("")),
        ("domain", json!("../web1")),
        ("domain", json!("-f")),
        ("domain", json!("a b")),
        ("domain", json!(long)),
        ("uuid", json!("web1")),
        ("uuid", json!(long)),
        ("pages_max", json!(u32::MAX)),
        ("pages_max", json!(-1)),
        // Another host than the certificate's.
        ("from", json!("host-b")),
    ] {
        let mut control = domains.call("host-a", Kind::Control).unwrap();
        let mut order = order();
        order[part] = value;
        say(&mut control, &order);
        let why = ending(&mut control);
        // It closes the connection, or has a reason.
        assert!(why.len() < 20_000, "{part}: {} letters", why.len());
        drop(control);
        assert_unharmed(&domains);
    }
    drop(domains.migrate(Side::A, "web1", &[]));
}

/// A domain for which host B has a receiver, and a lane.
struct Accepted {
    control: Connection,
    lane: Connection,
}

impl Accepted {
    fn new(domains: &Domains) -> Self {
        let mut control = domains.call("host-a", Kind::Control).unwrap();
        say(&mut control, &order());
        let Some(ToSource::Carrying(carrying)) = hear(&mut control) else {
            panic!("{}", domains.logs())
        };
        let token = u128::from_str_radix(&carrying.token, 16).unwrap();
        let token = Token(token.to_be_bytes());
        let lane = domains.call("host-a", Kind::Lane { number: 0, token }).unwrap();
        Self { control, lane }
    }

    /// Sends all that precedes pages, and starts the first epoch.
    fn begin(&mut self) {
        let tail = made_up(EVIL, DomainKind::Pv, PAGES);
        let position = tail.len();
        frame(&mut self.control, &Frame::Tail(tail));
        say(&mut self.control, &json!({ "say": "epoch", "epoch": 1, "position": position }));
    }

    fn pages(&mut self, block: u16, pages: &[u32], fills: &[(u32, u32)], payload: &[u8]) {
        Pages { encoding: 0, block, pages, fills, payload }.send(&mut self.lane);
    }
}

/// What a hostile source does once it is accepted.
type Act = fn(&mut Accepted);

const ACTS: [(&str, Act); 12] = [
    ("garbage instead of a stream", |it| {
        frame(&mut it.control, &Frame::Tail(vec![0x5a; 1 << 20]));
    }),
    ("an epoch that does not follow", |it| {
        say(&mut it.control, &json!({ "say": "epoch", "epoch": 7, "position": 0 }));
    }),
    ("an epoch elsewhere", |it| {
        say(&mut it.control, &json!({ "say": "epoch", "epoch": 1, "position": 1_u64 << 60 }));
    }),
    ("pages of no type", |it| {
        it.begin();
        it.pages(5, &[1], &[], &[1; 4096]);
    }),
    ("a page outside of the domain", |it| {
        it.begin();
        it.pages(0, &[u32::MAX], &[], &[1; 4096]);
    }),
    ("pages up to the last number", |it| {
        it.begin();
        it.pages(0, &[], &[(1, u32::MAX)], &[]);
    }),
    ("pages that repeat what no page repeats", |it| {
        it.begin();
        it.pages(0, &[], &[(1, 2)], &[]);
    }),
    ("more payload than pages", |it| {
        it.begin();
        it.pages(0, &[1], &[], &[1; 8192]);
    }),
    ("the end without a domain", |it| {
        it.begin();
        say(&mut it.control, &json!({ "say": "placed", "audit": [] }));
        frame(&mut it.control, &Frame::Tail(vec![0; 64]));
    }),
    ("messages of another kind of migration", |it| {
        say(&mut it.control, &json!({ "say": "complete", "residue_bytes": 0 }));
    }),
    ("a record of the library that has no end", |it| {
        it.begin();
        let record = [1_u32.to_le_bytes(), u32::MAX.to_le_bytes()].concat();
        frame(&mut it.control, &Frame::Tail(record));
        frame(&mut it.control, &Frame::Tail(vec![0xff; 1 << 20]));
        say(&mut it.control, &json!({ "say": "abort", "reason": "no more" }));
    }),
    ("nothing more", |it| {
        it.begin();
        say(&mut it.control, &json!({ "say": "abort", "reason": "no more" }));
    }),
];

#[test]
fn what_breaks_the_rules_ends_the_migration() {
    let domains = domains();
    for (what, act) in ACTS {
        let mut accepted = Accepted::new(&domains);
        act(&mut accepted);
        let why = ending(&mut accepted.control);
        assert!(why.len() < 20_000, "{what}: {} letters", why.len());
        drop(accepted);
        assert_unharmed(&domains);
    }
    drop(domains.migrate(Side::A, "web1", &[]));
}

/// Hosts that may send domains, all at once and without an end: each is closed, and the agent's
/// memory stays bounded.
#[test]
fn many_domains_that_never_come() {
    let domains = domains();
    let mut open = Vec::new();
    for number in 0..8 {
        let mut order = order();
        let name = format!("{EVIL}{number}");
        order["domain"] = json!(name);
        order["uuid"] = json!(uuid(&name));
        // As many as a domain can have.
        order["pages_max"] = json!(1_u32 << 28);
        let mut control = domains.call("host-a", Kind::Control).unwrap();
        say(&mut control, &order);
        open.push(control);
    }
    for control in &mut open {
        // A token, or a reason.
        assert!(hear(control).is_some(), "{}", domains.logs());
    }
    drop(open);
    assert_unharmed(&domains);
    drop(domains.migrate(Side::A, "web1", &[]));
}
