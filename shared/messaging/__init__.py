"""NATS as Thaw's processes use it."""

from shared.messaging.mesh import Mesh, Responder

__all__ = ["Mesh", "Responder"]
