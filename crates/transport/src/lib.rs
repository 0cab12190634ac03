//! Lanes: connections between two agents that carry batches.
