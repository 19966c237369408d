"""What is particular to one engine: its command line, its API, its ways to sleep. A driver knows nothing of the mesh."""
