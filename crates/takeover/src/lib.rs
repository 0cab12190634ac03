//! Takes the place of another program's socket file for a while: whoever connects there
//! comes here, and can still be led on to where the other one listens. And connects to
//! sockets that others have made.

mod connect;
mod directory;
mod error;
mod replaced;
mod watch;

pub use connect::{connect, connect_opened};
pub use directory::{Directory, Inode};
pub use error::{TakeoverError, Trying};
pub use replaced::Replaced;
pub use watch::Watch;
