"""Decisions of the gateway: no clock, no network, no randomness."""
