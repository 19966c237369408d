"""NATS as Thaw's processes use it."""

from shared.messaging.mesh import Mesh
from shared.messaging.responders import Responder

__all__ = ["Mesh", "Responder"]
