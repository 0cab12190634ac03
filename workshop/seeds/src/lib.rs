//! What fuzzing begins with, as far as tests use it too.

pub mod recording;
