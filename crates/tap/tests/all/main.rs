//! Both ends of a tap. One program, since each is linked by itself.

mod streams;
mod taken;
