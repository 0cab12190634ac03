//! One suite for all directories: all give the same answers.

mod cases;
mod embedded;
mod remote;
mod world;
