//! One suite for all directories: whichever is asked answers the same.

mod cases;
mod cluster;
mod embedded;
mod redis;
mod redis_server;
mod remote;
mod world;
