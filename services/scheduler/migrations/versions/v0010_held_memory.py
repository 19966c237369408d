"""Record the memory that models hold over time, and up to when it is recorded of each node."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "held_memory",
        sa.Column("hour", sa.Integer, primary_key=True),
        sa.Column("key", sa.Text, primary_key=True),
        sa.Column("model", sa.Text, primary_key=True),
        sa.Column("kind", sa.Text, primary_key=True),
        sa.Column("byte_s", sa.Float, nullable=False),
    )
    op.create_table("held_clocks", sa.Column("node", sa.Text, primary_key=True), sa.Column("until", sa.Float, nullable=False))


def downgrade() -> None:
    for table in ("held_memory", "held_clocks"):
        op.drop_table(table)
