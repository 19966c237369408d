"""The migrator moves running requests between engines with a short pause.

The mesh also works without it.
"""
