"""Execution of batches."""
