"""The gateway's side of NATS."""
