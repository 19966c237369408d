"""Traces, phases, metrics and logs, the same in every process."""
