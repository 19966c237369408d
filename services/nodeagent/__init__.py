"""The agent of one node: devices, engine processes, node status."""
