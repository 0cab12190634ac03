//! Guest RAM that the agent made and shares with QEMU.
