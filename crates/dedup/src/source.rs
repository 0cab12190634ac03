//! The source's half: names for pages that the destination may have already.

mod announcer;
mod guest_page_cache;
mod naming;
mod storage_notes;

pub use announcer::{Announcer, after};
pub use guest_page_cache::{Asking, GuestPageCache, Room};
pub use naming::{Naming, Plan};
pub use storage_notes::StorageNotes;
