//! Certificates of hosts and people, and authenticated, encrypted connections
//! between agents.
//!
//! [`Authority`] is the operator's CA, made and used by `droveway ca`. What it
//! issues for a host is that host's [`Identity`]. With it an agent turns a TCP
//! connection into a [`Connection`] whose other end is known by name.
//!
//! rustls does the handshake: it verifies the peer and agrees on keys. From then on
//! records are sealed and opened here (`record`), because a lane needs what a
//! rustls connection can't give: one thread that writes while another reads,
//! without a lock between them; bytes decrypted straight into the caller's buffer;
//! and no allocation for each 16 KiB. rustls hands over its keys for this purpose
//! (`rustls::kernel`), and still makes new ones. For kTLS, the kernel would be given
//! the same keys in the same place: `Connection::secured`.

#![forbid(unsafe_code)]

mod admission;
mod authority;
mod certificate;
mod connection;
mod credentials;
mod files;
pub mod fuzzing;
mod handshake;
mod identity;
mod inbox;
#[cfg(test)]
mod interop;
mod keys;
mod messages;
mod outbox;
mod people;
mod reader;
mod record;
mod refusal;
mod security;
mod socket;
mod subject;
mod tickets;
mod verify;
mod writer;

pub use admission::{Admission, AdmissionBounds, Admissions, LEAVING_MAX};
pub use authority::{Authority, AuthorityError, CertificateRequest, Issued};
pub use certificate::Validity;
pub use connection::Connection;
pub use credentials::IdentityError;
pub use files::{FileError, Files, Readers, Writing, make_dir};
pub use handshake::{HANDSHAKE_MAX, HandshakeError, is_tls_alert};
pub use identity::Identity;
pub use people::{Person, explain, notice_dead_peer, shown};
pub use reader::Reader;
pub use record::RecordError;
pub use refusal::{CertificateProblem, Refusal};
pub use security::{Security, WithinProcess};
pub use socket::Closer;
pub use subject::{LETTERS_MAX, NameError, Role, Subject, check_name};
pub use writer::Writer;
