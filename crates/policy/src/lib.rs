//! Decisions as pure functions of samples.
