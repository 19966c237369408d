"""Record the memory that starts cleared for themselves, and the restarts that they caused."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("plans", sa.Column("preempted", JSONB))
    op.add_column("plans", sa.Column("caused_by", sa.Text))
    op.create_table(
        "displacements",
        sa.Column("plan_id", sa.Text, primary_key=True),
        sa.Column("payer", sa.Text, primary_key=True),
        sa.Column("hour", sa.Integer, nullable=False),
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("victims", sa.Integer, nullable=False),
        sa.Column("clearing_s", sa.Float, nullable=False),
        sa.Column("restart_s", sa.Float, nullable=False),
        sa.Column("device_kind", sa.Text, nullable=False),
        sa.Column("devices", sa.Integer, nullable=False),
    )
    op.create_index("displacements_by_payer", "displacements", ["payer"])
    op.create_index("displacements_by_hour", "displacements", ["hour"])


def downgrade() -> None:
    op.drop_table("displacements")
    for column in ("caused_by", "preempted"):
        op.drop_column("plans", column)
