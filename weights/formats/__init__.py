"""Formats of checkpoints on disk and of segments in memory."""
