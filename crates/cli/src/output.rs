//! Formatting for the commands' output: figures, tables, JSON, words.

pub(crate) mod amount;
mod bounds;
pub(crate) mod date;
pub(crate) mod event;
mod json;
mod phase;
mod printing;
mod sentence;
mod shell;
mod stayed;
mod table;
mod tone;
pub(crate) mod vm;

pub(crate) use bounds::described;
pub(crate) use json::print_json;
pub(crate) use phase::phase_name;
pub(crate) use printing::{eprint_line, legible, print, print_line, print_raw};
pub(crate) use sentence::full_stop;
pub(crate) use shell::quoted;
pub(crate) use stayed::Stayed;
pub(crate) use table::aligned;
pub(crate) use tone::Tone;
