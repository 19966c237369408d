"""Add the ledger of usage."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "usage",
        sa.Column("hour", sa.Integer, primary_key=True),
        sa.Column("key", sa.Text, primary_key=True),
        sa.Column("model", sa.Text, primary_key=True),
        sa.Column("adapter", sa.Text, primary_key=True),
        *(
            sa.Column(name, sa.BigInteger, nullable=False)
            for name in ("requests", "failed", "prompt_tokens", "cached_tokens", "completion_tokens", "cold_requests")
        ),
    )
    op.create_table(
        "cold_waits",
        sa.Column("plan_id", sa.Text, primary_key=True),
        sa.Column("key", sa.Text, primary_key=True),
        sa.Column("model", sa.Text, primary_key=True),
        sa.Column("adapter", sa.Text, primary_key=True),
        sa.Column("hour", sa.Integer, nullable=False),
        sa.Column("requests", sa.BigInteger, nullable=False),
        sa.Column("start_s", sa.Float, nullable=False),
    )
    op.create_index("cold_waits_by_hour", "cold_waits", ["hour"])
    op.create_table(
        "usage_spools",
        sa.Column("spool", sa.Text, primary_key=True),
        sa.Column("position", sa.BigInteger, nullable=False),
        sa.Column("hour", sa.Integer, nullable=False),
    )


def downgrade() -> None:
    for table in ("usage", "cold_waits", "usage_spools"):
        op.drop_table(table)
