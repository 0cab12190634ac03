//! Both ends of a transport. One program, since each is linked by itself.

mod faults;
mod lanes;
mod security;
