"""Suspending engines: control groups, and methods to free memory."""
