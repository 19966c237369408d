"""Handlers of the messages that the mesh sends to a gateway."""
