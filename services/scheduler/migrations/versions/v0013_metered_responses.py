"""Store which responses of Idempotency-Keys count already (ADR 0095)."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "metered_responses",
        sa.Column("answer_id", sa.Text, primary_key=True),
        sa.Column("hour", sa.Integer, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("metered_responses")
