//! What two agents say to each other, without I/O.
