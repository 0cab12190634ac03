//! Orders of one agent to another for a gang, on a connection of their own: order after order, each
//! with one answer.

use serde::{Deserialize, Serialize};

use crate::gang;
use crate::part::Part;

/// An order. Its answer is a plain [`gang::Answer`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Order {
    /// The ordering agent's name.
    pub from: String,
    /// The order.
    pub order: Part<gang::Order>,
}
