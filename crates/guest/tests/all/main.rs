//! The helper as a program, and at its port. One program, since each is linked by itself.

mod output;
mod serving;
