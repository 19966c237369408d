"""How an engine runs: as processes of this machine, or as a container."""
