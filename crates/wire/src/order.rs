//! What one agent has another do for a gang, on a connection of its own: order
//! after order, each with one answer.

use serde::{Deserialize, Serialize};

use crate::gang;
use crate::part::Part;

/// One order. Its answer is a [`gang::Answer`] by itself.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Order {
    /// The agent that gives it.
    pub from: String,
    /// What it wants.
    pub order: Part<gang::Order>,
}
