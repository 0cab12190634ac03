//! Both ends of a disk that moves. One program, since each is linked by itself.

mod bounds;
mod ends;
mod ordering;
mod whole_way;
