"""The agent of one node: owns its devices and their memory, runs engine processes, and publishes the node's status."""
