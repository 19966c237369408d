"""Runtimes: an engine as processes of this machine, or as a container."""
