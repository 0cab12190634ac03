//! One suite for all directories: all give the same answers.

mod cases;
mod cluster;
mod embedded;
mod redis;
mod redis_server;
mod remote;
mod world;
