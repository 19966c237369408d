"""Metrics, traces and log entries of finished requests."""
