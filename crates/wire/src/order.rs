//! What one agent has another do for a gang, on a connection of its own: order
//! after order, each with one answer.

use serde::{Deserialize, Serialize};

/// One order. Its answer is a message of the agents' own, as JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Order {
    /// The agent that gives it.
    pub from: String,
    /// What it wants.
    pub order: serde_json::Value,
}
