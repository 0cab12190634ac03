//! A lock over ranges of addresses, kept in a skip list.
