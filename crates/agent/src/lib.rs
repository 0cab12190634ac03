//! The daemon of one host: its API and its VMs.
