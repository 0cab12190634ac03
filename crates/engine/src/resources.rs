//! Resources that all migrations of an agent share.

use std::net::IpAddr;
use std::sync::Arc;

use dedup::destination::NAMED_BYTES_MAX;
use dedup::rack::SERVED_BYTES_MAX;
use page::{Budget, BudgetFull, Pool, Reserve, SLOT_BYTES};
use transport::{Deltas, Unpackers};

use crate::network::Network;
use crate::tail::TAILS_BYTES_MAX;

/// Most lanes of one migration: a source opens no more, and a destination serves no more.
pub(crate) const LANES_MAX: usize = 64;

/// Resources that all migrations of an agent share: buffers, memory for device state, for what lanes
/// receive, for pages by name and for deltas, and its NICs.
///
/// Outgoing and incoming migrations have separate buffers: otherwise two migrations that cross
/// between two hosts would wait for each other.
#[derive(Debug)]
pub struct Resources {
    pool_bytes: usize,
    outgoing: Arc<Budget>,
    incoming: Arc<Budget>,
    /// For VMs that leave, where their migrations are carried.
    pub(crate) leaving_tails: Arc<Reserve>,
    pub(crate) coming_tails: Arc<Reserve>,
    /// For what is kept of pages that VMs have sent.
    pub(crate) deltas: Arc<Reserve>,
    /// For pages of arriving VMs that are sent by name.
    pub(crate) named: Arc<Reserve>,
    /// For what lanes receive, until it is placed.
    pub(crate) unpackers: Arc<Reserve>,
    /// For content that other hosts of the rack wait for.
    pub(crate) served: Arc<Reserve>,
    pub(crate) network: Arc<Network>,
}

/// How full the buffers of one direction are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffers {
    /// Their size.
    pub bytes: usize,
    /// Bytes in use.
    pub used_bytes: usize,
}

/// Not even the minimum for a migration is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "no buffers are left for it: at most {most} VMs can {verb} at a time with pool-mib {mib}, and \
     those that move with their disks count twice. Wait until one has ended, or give the agent \
     there a larger pool-mib"
)]
pub struct BuffersFull {
    verb: &'static str,
    most: usize,
    mib: usize,
}

/// The pools of one migration at one of its ends. Each has a reserved minimum.
#[derive(Debug)]
pub(crate) struct Pools {
    /// For pages, between QEMU and the lanes.
    pub(crate) pages: Arc<Pool>,
    /// For blocks, between the lanes and QEMU's disks.
    pub(crate) blocks: Option<Arc<Pool>>,
    /// The most that one of them can use.
    pub(crate) bound_bytes: usize,
    budget: Arc<Budget>,
}

impl Resources {
    /// At most `pool_bytes` of buffers for all outgoing migrations, and as many for all incoming
    /// ones, and NIC speeds that the operator has configured: addresses, and bytes per second.
    #[must_use]
    pub fn new(pool_bytes: usize, speeds: Vec<(IpAddr, u64)>) -> Arc<Self> {
        let (outgoing, incoming) = (Budget::new(pool_bytes), Budget::new(pool_bytes));
        Arc::new(Self {
            pool_bytes,
            outgoing,
            incoming,
            leaving_tails: Reserve::new(TAILS_BYTES_MAX),
            coming_tails: Reserve::new(TAILS_BYTES_MAX),
            deltas: Reserve::new(Deltas::ALL_BYTES_MAX),
            named: Reserve::new(NAMED_BYTES_MAX),
            unpackers: Reserve::new(Unpackers::bytes_max(LANES_MAX)),
            served: Reserve::new(SERVED_BYTES_MAX),
            network: Network::new(speeds),
        })
    }

    /// The buffers of outgoing and of incoming migrations.
    #[must_use]
    pub fn buffers(&self) -> [Buffers; 2] {
        [&self.outgoing, &self.incoming]
            .map(|budget| Buffers { bytes: budget.bytes(), used_bytes: budget.out_bytes() })
    }

    /// The pools for a new outgoing migration.
    pub(crate) fn leaving(&self, with_disks: bool) -> Result<Pools, BuffersFull> {
        self.pools(&self.outgoing, with_disks).map_err(|full| self.full("leave", full))
    }

    /// The pools for a new incoming migration.
    pub(crate) fn coming(&self, with_disks: bool) -> Result<Pools, BuffersFull> {
        self.pools(&self.incoming, with_disks).map_err(|full| self.full("come", full))
    }

    fn pools(&self, budget: &Arc<Budget>, with_disks: bool) -> Result<Pools, BudgetFull> {
        let pages = Pool::within(budget, self.pool_bytes)?;
        // A slow disk leaves half of all buffers to pages.
        let blocks = with_disks.then(|| Pool::within(budget, self.pool_bytes / 2)).transpose()?;
        let (bound_bytes, budget) = (budget.bytes(), Arc::clone(budget));
        Ok(Pools { pages, blocks, bound_bytes, budget })
    }

    fn full(&self, verb: &'static str, full: BudgetFull) -> BuffersFull {
        let most = full.total_bytes / full.needed_bytes.max(1);
        BuffersFull { verb, most, mib: self.pool_bytes >> 20 }
    }
}

impl Pools {
    /// How many batches of blocks the source may send before the first of them is written: a
    /// quarter of all buffers. So four migrations with slow disks have room for what they announce,
    /// and no lane waits for any of them.
    pub(crate) fn block_room(&self) -> u64 {
        (self.bound_bytes / SLOT_BYTES / 4).max(1) as u64
    }

    /// The most bytes in the pools: the sum of the highs of pages and blocks, or that of all
    /// migrations if it is smaller.
    pub(crate) fn high_water_bytes(&self) -> u64 {
        let pools = [Some(&self.pages), self.blocks.as_ref()];
        let sum: usize = pools.into_iter().flatten().map(|pool| pool.high_water_bytes()).sum();
        sum.min(self.budget.high_water_bytes()) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_limit_the_number_of_migrations() {
        let resources = Resources::new(16 << 20, Vec::new());
        let mut leaving: Vec<Pools> = (0..6).map(|_| resources.leaving(false).unwrap()).collect();
        let text = resources.leaving(true).unwrap_err().to_string();
        assert!(text.contains("at most 7 VMs can leave at a time with pool-mib 16"), "{text}");
        // One without disks still fits, and incoming migrations are not affected.
        leaving.push(resources.leaving(false).unwrap());
        assert!(resources.leaving(false).is_err());
        assert_eq!(leaving[0].block_room(), 7);
        drop(resources.coming(true).unwrap());
        leaving.pop();
        drop(resources.leaving(false).unwrap());
    }

    #[test]
    fn a_migration_that_uses_all_buffers_leaves_the_next_its_minimum() {
        let resources = Resources::new(16 << 20, Vec::new());
        let greedy = resources.coming(false).unwrap();
        let taken: Vec<_> = (0..26).map(|_| greedy.pages.take().unwrap()).collect();
        let next = resources.coming(false).unwrap();
        drop(next.pages.take().unwrap());
        drop(taken);
        assert_eq!(greedy.high_water_bytes(), 26 * SLOT_BYTES as u64);
        assert_eq!(next.high_water_bytes(), SLOT_BYTES as u64);
    }
}
