//! The receiver of the pages that are read.

use page::PAGE_BYTES;

use crate::{Failure, Item};

/// Receives pages. Each added item ends exactly once: refused by
/// [`Consumer::wants`], in [`Consumer::read`], in [`Consumer::failed`], or
/// taken from the end.
///
/// Called on the reader's threads, on several at once, and never with one of
/// its locks held; it may add and take items. Time spent in `read` delays that
/// thread's next request.
pub trait Consumer: Send + Sync + 'static {
    /// Whether the page is still wanted, asked right before its request
    /// starts. `false` ends the item, so an item that a newer page has replaced
    /// need not be withdrawn.
    fn wants(&self, _item: &Item) -> bool {
        true
    }

    /// Receives the pages of one request, which can be hashed and placed together.
    /// Their content may be anything: verify it by name.
    fn read(&self, pages: Pages<'_>);

    /// These items will not be read.
    fn failed(&self, items: &[Item], why: &Failure);

    /// Nothing is wanted or in flight, until something is added. Also called on the
    /// thread that takes the last items from the end.
    fn idle(&self) {}

    /// The reader reads no more, and all of its items have ended: because of a
    /// failure, or because its owner stopped it.
    fn ended(&self, _why: &Failure) {}
}

/// Pages of one request, in the image's order, borrowed until `read` returns.
#[derive(Clone, Copy, Debug)]
pub struct Pages<'a> {
    items: &'a [Item],
    /// The image from `start` on.
    bytes: &'a [u8],
    start: u64,
}

impl<'a> Pages<'a> {
    /// All of the items lie in `bytes`.
    pub(crate) fn new(items: &'a [Item], bytes: &'a [u8], start: u64) -> Self {
        Self { items, bytes, start }
    }

    /// Their items; one page may be wanted by several.
    #[must_use]
    pub fn items(&self) -> &'a [Item] {
        self.items
    }

    /// Each token with its page.
    pub fn iter(&self) -> impl Iterator<Item = (u64, &'a [u8; PAGE_BYTES])> + use<'a> {
        let Self { items, bytes, start } = *self;
        items.iter().filter_map(move |item| {
            let from = usize::try_from(item.offset.checked_sub(start)?).ok()?;
            Some((item.token, bytes.get(from..)?.first_chunk()?))
        })
    }
}
