"""Add measured memory of models' engines, by kind of device."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "profiles",
        sa.Column("model", sa.Text, primary_key=True),
        sa.Column("generation", sa.Integer, nullable=False),
        sa.Column("engine", sa.Text, nullable=False),
        sa.Column("by_kind", JSONB, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("profiles")
