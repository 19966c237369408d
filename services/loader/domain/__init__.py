"""Decisions of the loader, without I/O: `decide(state, event, now)`."""
