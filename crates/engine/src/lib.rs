//! One migration: source, destination, phases and report.
