//! Certificates, handshakes and connections. One program, since each is linked by itself.

mod authority;
mod common;
mod duplex;
mod ending;
mod handshake;
