//! What one VM that arrives does with pages that come by name.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::{self, JoinHandle};
use std::time::Instant;

use content::{Domain, Member, Name};
use crossbeam_channel::{Receiver, unbounded};
use page::{BlockId, Epoch, Fill, PageIndex};
use parking_lot::Mutex;
use placer::{PlaceError, Placer};
use wire::{Late, NamedHeader, ToSource};

use super::coming::{Bringer, Claim};
use super::copies::Copies;
use super::taker::{Blocks, Place, Taker, Ticket};
use super::{Sharing, Waiter};
use crate::link::Link;

/// Batches that the source is told of at a time.
const TOLD_AT_ONCE: usize = 256;

/// Pages by name of one VM that arrives, until it is dropped.
pub(crate) struct Resolving {
    sharing: Arc<Sharing>,
    taker: Arc<Taker>,
    /// Buffers of lanes, used again for each batch.
    spare: Mutex<Vec<Copies>>,
    telling: Option<JoinHandle<()>>,
}

impl Sharing {
    /// A VM arrives whose pages may come by name.
    ///
    /// # Errors
    /// If the system gives no thread.
    pub(crate) fn take_in(
        self: &Arc<Self>,
        domain: &Domain,
        placer: Arc<Placer>,
        blocks: Blocks,
        link: Arc<Link<ToSource>>,
    ) -> std::io::Result<Resolving> {
        let number = self.last.fetch_add(1, Relaxed) + 1;
        let key = self.key(domain);
        let blocks = Arc::new(blocks);
        let member = self.index.join(Arc::clone(&blocks) as _, key.clone(), blocks.pages());
        let member = Arc::new(member.ok_or_else(|| {
            std::io::Error::other("more VMs hold content here than can be told apart")
        })?);
        let (tell, told) = unbounded();
        let taker = Arc::new(Taker::new(number, key, placer, (member, blocks), tell));
        let telling =
            thread::Builder::new().name("late".to_owned()).spawn(move || say_late(&told, &link))?;
        self.arriving.lock().insert(number);
        let sharing = Arc::clone(self);
        Ok(Resolving { sharing, taker, spare: Mutex::default(), telling: Some(telling) })
    }
}

/// Tells the source what has become of pages that came later.
fn say_late(told: &Receiver<Late>, link: &Link<ToSource>) {
    while let Ok(first) = told.recv() {
        let mut batches = vec![first];
        batches.extend(told.try_iter().take(TOLD_AT_ONCE - 1));
        if link.say(&ToSource::Late { batches }).is_err() {
            return;
        }
    }
}

impl Resolving {
    /// What the VM holds, for when it runs here.
    pub(super) fn held(&self) -> (Arc<Member>, Arc<Blocks>) {
        (Arc::clone(&self.taker.member), Arc::clone(&self.taker.blocks))
    }

    /// Copies what is here to where it is wanted. Says which pages that were.
    fn place_held(
        &self,
        header: NamedHeader,
        pages: &[PageIndex],
        names: &[Name],
    ) -> Result<u128, PlaceError> {
        let Taker { key, placer, .. } = &*self.taker;
        let mut copies = self.spare.lock().pop().unwrap_or_default();
        let here = copies.find(&self.sharing.index, key, names, pages.iter().copied());
        let placed = copies.place(placer, header.block, header.epoch);
        self.spare.lock().push(copies);
        placed.map(|()| here)
    }

    /// Claims what is not here. Says what is wanted and what comes later.
    fn claim(
        &self,
        header: NamedHeader,
        pages: &[PageIndex],
        names: &[Name],
        here: u128,
    ) -> (u128, u128) {
        let NamedHeader { block, epoch, ticket, .. } = header;
        let taker = &self.taker;
        if !taker.may_claim(pages.len()) {
            let all = u128::MAX >> (128 - pages.len().clamp(1, 128));
            return (all & !here, 0);
        }
        let (now, may_wait) = (Instant::now(), header.may_wait && taker.may_wait());
        let mut wanted = taker.has_asked(block, epoch, pages, names) & !here;
        let mut later = 0_u128;
        // Held until the ticket is there: what it waits for may come at once.
        let mut tickets = taker.tickets.lock();
        let mut coming = self.sharing.coming.lock();
        for (nth, (page, name)) in pages.iter().zip(names).enumerate() {
            if (here | wanted) >> nth & 1 == 1 {
                continue;
            }
            let waits = || {
                let nth = u8::try_from(nth).ok().filter(|_| may_wait)?;
                let place = Place { block, epoch, page: *page, ticket, nth };
                Some(Waiter { taker: Arc::clone(taker), place })
            };
            match coming.claim(*name, Bringer(taker.number), now, waits) {
                Claim::Waits => later |= 1 << nth,
                Claim::Yours | Claim::OnItsWay => wanted |= 1 << nth,
            }
        }
        drop(coming);
        if later != 0 {
            let left = later.count_ones() as usize;
            taker.waits(left);
            tickets.insert(ticket, Ticket { left, wanted: Vec::new() });
        }
        (wanted, later)
    }
}

impl transport::Resolver for Resolving {
    fn resolve(
        &self,
        header: NamedHeader,
        pages: &[PageIndex],
        names: &[Name],
    ) -> Result<(u128, u128), PlaceError> {
        self.taker.placer.check(header.block, pages)?;
        let here = self.place_held(header, pages, names)?;
        let (wanted, later) = self.claim(header, pages, names, here);
        let NamedHeader { block, epoch, .. } = header;
        let asked = pages.iter().zip(names).enumerate().filter(|(nth, _)| wanted >> nth & 1 == 1);
        let asked = asked.map(|(_, (page, name))| (block, epoch, *page, *name));
        self.sharing.over(&self.taker.asks(asked));
        Ok((wanted, later))
    }

    fn came(&self, block: BlockId, epoch: Epoch, pages: &[PageIndex]) {
        self.sharing.over(&self.taker.came(block, epoch, pages));
    }

    fn filled(&self, block: BlockId, epoch: Epoch, fills: &[Fill]) {
        self.sharing.over(&self.taker.filled(block, epoch, fills));
    }
}

impl Drop for Resolving {
    fn drop(&mut self) {
        self.taker.end();
        self.sharing.arriving.lock().remove(&self.taker.number);
        if let Some(telling) = self.telling.take() {
            let _ = telling.join();
        }
    }
}
