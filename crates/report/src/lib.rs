//! Migrations, gangs and VMs for people: amounts, dates, states and events in words, and reports as
//! text and as an HTML page.

#![forbid(unsafe_code)]

pub mod amount;
mod bounds;
pub mod date;
pub mod details;
pub mod event;
#[cfg(any(test, feature = "example"))]
pub mod example;
pub mod gang;
pub mod html;
mod phase;
pub mod progress;
mod sentence;
mod stayed;
pub mod summary;
mod table;
mod tone;
pub mod vm;

pub use bounds::described;
pub use phase::phase_name;
pub use sentence::full_stop;
pub use stayed::Stayed;
pub use table::aligned;
pub use tone::Tone;
