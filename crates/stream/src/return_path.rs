//! What a destination answers on the main channel, with the capability
//! `return-path`: messages of a be16 kind, a be16 length and that many bytes.

/// The destination is ready for the VM to stop. A source with the capability
/// `switchover-ack` (8.1 and newer) does not stop a running VM before.
pub const SWITCHOVER_ACK: [u8; 4] = [0, 7, 0, 0];

/// The destination has no more to say, and nothing went wrong. A source that
/// listens does not end its migration before.
pub const SHUT: [u8; 8] = [0, 1, 0, 4, 0, 0, 0, 0];
