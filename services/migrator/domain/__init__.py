"""Decisions about one migration at a time: no NATS, no clock."""
