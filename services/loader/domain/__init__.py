"""What the loader decides, without any I/O: `decide(state, event, now)`."""
