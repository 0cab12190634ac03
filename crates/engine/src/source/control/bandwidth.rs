//! What the VM needs of the network, from the sampler to the thread that paces the lanes.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use super::sampler::window::Window;

/// The rate that the VM needs, and whether lanes may get more than now.
#[derive(Default)]
pub(crate) struct Bandwidth {
    /// Written by the sampler: bytes per second of all lanes, as the bits of a float.
    needed: AtomicU64,
    /// Written by the thread that paces the lanes.
    wider: AtomicBool,
}

impl Bandwidth {
    pub(crate) fn need(&self, bytes_per_s: f64) {
        self.needed.store(bytes_per_s.to_bits(), Relaxed);
    }

    /// 0 if the VM needs no more than it gets.
    pub(crate) fn needed(&self) -> f64 {
        f64::from_bits(self.needed.load(Relaxed))
    }

    pub(crate) fn set_wider(&self, wider: bool) {
        self.wider.store(wider, Relaxed);
    }

    /// Whether lanes may get more than now, at the expense of other traffic.
    pub(crate) fn is_wider(&self) -> bool {
        self.wider.load(Relaxed)
    }
}

/// What lanes write for each byte that QEMU hands over: less if it is compressed, more if disks
/// move too.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct WireShare {
    bodies: f64,
    wire: f64,
}

/// Older bytes than the last ones of this number count half.
const COUNTED_BYTES: f64 = (64 << 20) as f64;

impl WireShare {
    /// Adds a window.
    pub(crate) fn add(&mut self, window: &Window) {
        self.bodies += window.bodies as f64;
        self.wire += window.wire_per_s * window.elapsed.as_secs_f64();
        if self.bodies > COUNTED_BYTES {
            self.bodies /= 2.0;
            self.wire /= 2.0;
        }
    }

    /// The bytes on lanes for so many bytes of bodies; 0 if none have come.
    pub(crate) fn wire_bytes(self, bodies: f64) -> f64 {
        if self.bodies > 0.0 { bodies * self.wire / self.bodies } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::sampler::window::Counts;
    use super::*;

    #[test]
    fn what_the_vm_needs_follows_what_its_content_shrinks_to() {
        let mut share = WireShare::default();
        assert_eq!(share.wire_bytes(1e6), 0.0);
        let mut add = |bodies, wire_bytes: u64| {
            let mut counts = Counts { wire_bytes, ..Counts::default() };
            counts.delivered.body_bytes = bodies;
            let second = Duration::from_secs(1);
            share.add(&Window::between(&Counts::default(), &counts, second));
            share.wire_bytes(1e6)
        };
        assert_eq!(add(32 << 20, 16 << 20), 5e5);
        // What came before counts less and less.
        let shares = [(); 8].map(|()| add(64 << 20, 64 << 20));
        assert!(shares.is_sorted() && shares[7] > 9.9e5 && shares[7] < 1e6, "{shares:?}");
    }
}
