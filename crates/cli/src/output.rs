//! The commands' output: text, JSON, words for a shell.

mod json;
mod printing;
mod shell;
pub(crate) mod vm;

pub(crate) use json::print_json;
pub(crate) use printing::{eprint_line, legible, print, print_line, print_raw};
pub(crate) use shell::quoted;
