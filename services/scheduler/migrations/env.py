"""Alembic's entry point: runs on the connection that `adapters.migrate` hands over."""

from __future__ import annotations

from alembic import context

from services.scheduler.adapters.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
with context.begin_transaction():
    context.run_migrations()
