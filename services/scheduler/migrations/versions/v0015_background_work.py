"""Record the device time that is charged to no request, and the engines' last readings of it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "background_work",
        sa.Column("hour", sa.Integer, primary_key=True),
        sa.Column("key", sa.Text, primary_key=True),
        sa.Column("model", sa.Text, primary_key=True),
        sa.Column("plan_id", sa.Text, primary_key=True),
        sa.Column("device_kind", sa.Text, primary_key=True),
        sa.Column("us", sa.BigInteger, nullable=False),
    )
    op.create_index("background_work_by_plan", "background_work", ["plan_id"])
    op.create_table(
        "background_readings",
        sa.Column("engine", sa.Text, primary_key=True),
        sa.Column("plan_id", sa.Text, primary_key=True),
        sa.Column("us", sa.BigInteger, nullable=False),
        sa.Column("hour", sa.Integer, nullable=False),
    )


def downgrade() -> None:
    for table in ("background_work", "background_readings"):
        op.drop_table(table)
