"""Parameters learned, residency by tier, links with their queues, and the predictions of plans."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("plans", sa.Column("predicted_ms", sa.Float))
    op.add_column("plans", sa.Column("error_ms", sa.Float))
    op.create_index("plans_by_instance", "plans", ["instance_id", "created"])
    op.create_table(
        "parameters",
        sa.Column("model", sa.Text, primary_key=True),
        sa.Column("node", sa.Text, primary_key=True),
        sa.Column("quantity", sa.Text, primary_key=True),
        sa.Column("value", sa.Float, nullable=False),
        sa.Column("error", sa.Float, nullable=False),
        sa.Column("count", sa.Integer, nullable=False),
        sa.Column("updated", sa.Float, nullable=False, server_default=sa.text("extract(epoch from clock_timestamp())")),
    )
    op.create_table(
        "residency",
        sa.Column("node", sa.Text, primary_key=True),
        sa.Column("weights_id", sa.Text, primary_key=True),
        sa.Column("tier", sa.Text, primary_key=True),
        sa.Column("nbytes", sa.BigInteger, nullable=False),
        sa.Column("heard_at", sa.Float, nullable=False),
    )
    op.create_table(
        "links",
        sa.Column("node", sa.Text, primary_key=True),
        sa.Column("link", sa.Text, primary_key=True),
        sa.Column("bytes_per_second", sa.Float),
        sa.Column("queued_bytes", sa.BigInteger, nullable=False),
        sa.Column("loads", sa.Integer, nullable=False),
        sa.Column("finish_ms", sa.Float),
        sa.Column("heard_at", sa.Float, nullable=False),
    )


def downgrade() -> None:
    for table in ("links", "residency", "parameters"):
        op.drop_table(table)
    op.drop_index("plans_by_instance", "plans")
    op.drop_column("plans", "error_ms")
    op.drop_column("plans", "predicted_ms")
