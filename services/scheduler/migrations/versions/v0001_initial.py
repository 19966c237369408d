"""The first tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "models",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("card", JSONB, nullable=False),
        sa.Column("error", sa.Text),
        sa.Column("resting", sa.Boolean, nullable=False, server_default="false"),
    )
    op.create_table(
        "nodes",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("boot_id", sa.Text, nullable=False),
        sa.Column("labels", JSONB, nullable=False),
        sa.Column("cordoned", sa.Boolean, nullable=False),
        sa.Column("drain_since", sa.Float),
    )
    op.create_table(
        "devices",
        sa.Column("node", sa.Text, primary_key=True),
        sa.Column("device_id", sa.Text, primary_key=True),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("budget_bytes", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "instances",
        sa.Column("instance_id", sa.Text, primary_key=True),
        sa.Column("plan_id", sa.Text, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("generation", sa.Integer, nullable=False),
        sa.Column("revision", sa.Text, nullable=False),
        sa.Column("node", sa.Text, nullable=False),
        sa.Column("device_ids", JSONB, nullable=False),
        sa.Column("token", sa.BigInteger, nullable=False),
        sa.Column("reserve_bytes", sa.BigInteger, nullable=False),
        sa.Column("kv_bytes", sa.BigInteger, nullable=False),
        sa.Column("requested_at", sa.Float, nullable=False),
        sa.Column("planned_at", sa.Float, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("leaving", sa.Text, nullable=False),
        sa.Column("leave_reason", sa.Text, nullable=False),
        sa.Column("stop_at", sa.Float),
        sa.Column("sent_at", sa.Float),
        sa.Column("ready_at", sa.Float),
        sa.Column("trigger", sa.Text, nullable=False),
        sa.Column("traceparent", sa.Text),
    )
    op.create_table(
        "plans",
        sa.Column("plan_id", sa.Text, primary_key=True),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("created", sa.Float, nullable=False),
        sa.Column("trigger", sa.Text, nullable=False),
        sa.Column("way", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("instance_id", sa.Text),
        sa.Column("outcome", sa.Text, nullable=False),
        sa.Column("chosen", JSONB),
        sa.Column("candidates", JSONB, nullable=False),
        sa.Column("predicted", JSONB, nullable=False),
        sa.Column("measured", JSONB, nullable=False),
        sa.Column("measured_ms", sa.Float),
        sa.Column("error", JSONB),
        sa.Column("traceparent", sa.Text),
    )
    op.create_table("leadership", sa.Column("id", sa.Integer, primary_key=True), sa.Column("epoch", sa.BigInteger, nullable=False))
    op.create_index("plans_by_model", "plans", ["model", "created"])
    op.create_index("plans_by_age", "plans", ["created"])
    op.execute("INSERT INTO leadership (id, epoch) VALUES (1, 0)")


def downgrade() -> None:
    for table in ("leadership", "plans", "instances", "devices", "nodes", "models"):
        op.drop_table(table)
