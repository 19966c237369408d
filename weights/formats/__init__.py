"""Checkpoints on disk and segments in memory: what their bytes mean."""
