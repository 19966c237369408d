"""Store the parts of starts by phase."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "start_phases",
        sa.Column("plan_id", sa.Text, primary_key=True),
        sa.Column("phase", sa.Text, primary_key=True),
        sa.Column("hour", sa.Integer, nullable=False),
        sa.Column("share", sa.Float, nullable=False),
    )
    op.create_index("start_phases_by_hour", "start_phases", ["hour"])


def downgrade() -> None:
    op.drop_table("start_phases")
