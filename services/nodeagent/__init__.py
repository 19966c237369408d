"""One per node: owns its devices and their memory, starts, watches and stops engine processes, and says what is alive."""
