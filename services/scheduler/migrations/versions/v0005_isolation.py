"""Registered models get a process of their own, as they had.

Earlier versions stored `isolation: shared` for every model, as the default of an option without
effect.
"""

from __future__ import annotations

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("UPDATE models SET card = jsonb_set(card, '{spec,isolation}', '\"dedicated\"') WHERE card->'spec' ? 'isolation'")


def downgrade() -> None:
    """Keep the cards: earlier versions ignore the option."""
