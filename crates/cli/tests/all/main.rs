//! Commands as people type them, and agents as processes. One program,
//! since each is linked by itself.

mod cancel;
mod certificates;
mod closed_output;
mod events;
mod gangs;
mod host;
mod init;
mod moves;
mod people;
mod restart;
mod vms;
mod watched;
