"""Decisions about one migration at a time, without NATS or a clock."""
