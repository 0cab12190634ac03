//! What writes pages into the destination's RAM.
