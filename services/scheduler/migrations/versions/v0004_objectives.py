"""Add counts of requests that met the objective of their model."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "objectives",
        sa.Column("model", sa.Text, primary_key=True),
        sa.Column("hours", JSONB, nullable=False),
        sa.Column("applied", JSONB, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("objectives")
