//! What commands that query agents run on.

use client::Problem;
use tokio::runtime::{Builder, Runtime};

/// One thread, which the command has already.
pub(crate) fn runtime() -> Result<Runtime, Problem> {
    let made = Builder::new_current_thread().enable_all().build();
    made.map_err(|source| Problem::Local { what: "starting".to_owned(), source })
}
