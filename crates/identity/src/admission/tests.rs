use super::*;

const KNOWN_MAX: AdmissionBounds = AdmissionBounds { all: 12, per_source: 8 };
const STRANGERS_MAX: AdmissionBounds = AdmissionBounds { all: 6, per_source: 3 };

/// A port and its open connections. Like a real one, each ends a moment after it gave way.
struct Port {
    admissions: Arc<Admissions<u32>>,
    open: Vec<(u32, Admission<u32>)>,
    next: u32,
}

impl Port {
    fn new(known: &[&str]) -> Self {
        let known = known.iter().map(|address| address.parse().unwrap());
        let admissions = Admissions::new(known, KNOWN_MAX, STRANGERS_MAX);
        Self { admissions, open: Vec::new(), next: 0 }
    }

    /// Opens a connection. Returns its handle, and that of the one that gave way.
    fn comes(&mut self, from: &str) -> (u32, Option<u32>) {
        let handle = self.next;
        self.next += 1;
        let (admission, gives_way) = self.admissions.admit(from.parse().unwrap(), handle).unwrap();
        self.open.push((handle, admission));
        if let Some(gone) = gives_way {
            let nth = self.open.iter().position(|(handle, _)| *handle == gone).unwrap();
            let (_, admission) = self.open.remove(nth);
            assert!(admission.gave_way());
        }
        assert!(self.open.iter().all(|(_, admission)| !admission.gave_way()));
        (handle, gives_way)
    }

    /// Opens more connections than an address may have. Returns how many more are open.
    fn fills(&mut self, from: &str) -> usize {
        let before = self.open.len();
        for _ in 0..100 {
            self.comes(from);
        }
        self.open.len() - before
    }

    fn is_open(&self, handle: u32) -> bool {
        self.open.iter().any(|(other, _)| *other == handle)
    }
}

#[test]
fn one_address_has_its_share_and_its_own_oldest_makes_room() {
    let mut port = Port::new(&[]);
    let others = port.comes("192.0.2.9").0;
    assert_eq!(port.fills("192.0.2.1"), STRANGERS_MAX.per_source);
    let oldest = port.open[1].0;
    assert_eq!(port.comes("192.0.2.1").1, Some(oldest));
    assert!(port.is_open(others));
}

#[test]
fn when_strangers_fill_all_places_the_largest_source_gives_way() {
    let mut port = Port::new(&[]);
    let first = port.comes("192.0.2.3").0;
    assert_eq!(port.fills("192.0.2.1") + port.fills("192.0.2.2"), 5);
    // The sources with most connections give way, not those with one.
    let second = port.comes("192.0.2.4").0;
    assert_eq!(port.open.len(), STRANGERS_MAX.all);
    assert!(port.is_open(first) && port.is_open(second));
    // One connection each, from more addresses than there are places: the oldest gives way.
    for last in 10..30 {
        let (handle, _) = port.comes(&format!("192.0.2.{last}"));
        assert!(port.is_open(handle));
    }
    assert_eq!(port.open.len(), STRANGERS_MAX.all);
    assert!(port.open.is_sorted_by_key(|(handle, _)| *handle));
    assert!(!port.is_open(first));
}

#[test]
fn a_known_address_is_admitted_while_strangers_fill_their_places() {
    let mut port = Port::new(&["10.0.0.1", "10.0.0.2"]);
    for last in 1..99 {
        port.fills(&format!("192.0.2.{last}"));
    }
    assert_eq!(port.open.len(), STRANGERS_MAX.all);
    for _ in 0..KNOWN_MAX.per_source {
        assert_eq!(port.comes("10.0.0.1").1, None);
    }
    // Nor does a known address that uses all of its share keep the other out.
    assert_eq!(port.fills("10.0.0.1"), 0);
    for _ in KNOWN_MAX.per_source..KNOWN_MAX.all {
        assert_eq!(port.comes("10.0.0.2").1, None);
    }
    let (_, gives_way) = port.comes("10.0.0.2");
    assert!(gives_way.is_some() && port.open.len() == KNOWN_MAX.all + STRANGERS_MAX.all);
}

#[test]
fn an_address_is_known_from_the_moment_that_it_was_identified() {
    let mut port = Port::new(&["10.0.0.1"]);
    assert_eq!(port.fills("10.0.0.5"), STRANGERS_MAX.per_source);
    port.admissions.remember("10.0.0.5".parse().unwrap());
    assert_eq!(port.fills("10.0.0.5"), KNOWN_MAX.per_source);
    // Of the remembered addresses, the one identified longest ago is forgotten.
    for nth in 0..u32::try_from(REMEMBERED_MAX).unwrap() {
        port.admissions.remember(Ipv4Addr::from_bits(nth | 172 << 24).into());
        port.admissions.remember("10.0.0.1".parse().unwrap());
    }
    assert_eq!(port.admissions.state.lock().remembered.len(), REMEMBERED_MAX);
    port.open.clear();
    assert_eq!(port.fills("10.0.0.5"), STRANGERS_MAX.per_source);
    assert_eq!(port.fills("10.0.0.1"), KNOWN_MAX.per_source);
}

#[test]
fn ended_connections_give_their_places_back() {
    let mut port = Port::new(&["10.0.0.1"]);
    for _ in 0..3 {
        assert_eq!(port.fills("192.0.2.1"), STRANGERS_MAX.per_source);
        assert_eq!(port.fills("10.0.0.1"), KNOWN_MAX.per_source);
        port.open.clear();
        let state = port.admissions.state.lock();
        for class in [&state.known, &state.strangers] {
            assert_eq!((class.waiting.len(), class.count, class.leaving), (0, 0, 0));
        }
    }
}

#[test]
fn connections_that_gave_way_and_stay_open_are_bounded() {
    let admissions = Admissions::new([], KNOWN_MAX, STRANGERS_MAX);
    let address: IpAddr = "192.0.2.1".parse().unwrap();
    let admit = || admissions.admit(address, ());
    let mut open: Vec<_> = std::iter::from_fn(admit).take(1000).collect();
    assert_eq!(open.len(), STRANGERS_MAX.per_source + LEAVING_MAX);
    assert!(open[0].0.gave_way());
    open.remove(0);
    assert!(admit().is_some());
}

#[test]
fn a_strangers_64_bits_of_ipv6_are_one_source_and_known_ones_are_addresses() {
    let mut port = Port::new(&["2001:db8::1", "2001:db8::2"]);
    for last in 0x10..0x99_u32 {
        port.comes(&format!("2001:db8::{last:x}:7"));
    }
    assert_eq!(port.open.len(), STRANGERS_MAX.per_source);
    port.comes("2001:db8:0:1::1");
    assert_eq!(port.open.len(), STRANGERS_MAX.per_source + 1);
    // Known hosts count by address, even in a /64 of strangers.
    assert_eq!(port.fills("2001:db8::1"), KNOWN_MAX.per_source);
    assert_eq!(port.fills("2001:db8::2"), KNOWN_MAX.all - KNOWN_MAX.per_source);
}

#[test]
fn an_address_is_the_same_however_it_is_written() {
    let mut port = Port::new(&["10.0.0.1", "::ffff:10.0.0.2"]);
    assert_eq!(port.fills("::ffff:10.0.0.1"), KNOWN_MAX.per_source);
    assert_eq!(port.fills("10.0.0.2"), KNOWN_MAX.all - KNOWN_MAX.per_source);
    // A local process can use all of 127.0.0.0/8.
    port.open.clear();
    for last in 1..99 {
        port.comes(&format!("127.0.1.{last}"));
        port.comes("::1");
    }
    assert_eq!(port.open.len(), STRANGERS_MAX.per_source);
    let mut port = Port::new(&["127.0.0.1"]);
    assert_eq!(port.fills("127.0.0.1"), KNOWN_MAX.per_source);
}
