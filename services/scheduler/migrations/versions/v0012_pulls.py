"""Store operators' pulls, which the next leader continues (ADR 0092)."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "pulls",
        sa.Column("key", sa.Text, primary_key=True),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("node", sa.Text, nullable=False),
        sa.Column("tier", sa.Text, nullable=False),
        sa.Column("weights_id", sa.Text, nullable=False),
        sa.Column("since", sa.Float, nullable=False),
        sa.Column("requests", JSONB, nullable=False),
        sa.Column("token", sa.BigInteger, nullable=False),
        sa.Column("sent_at", sa.Float, nullable=False),
        sa.Column("ended_at", sa.Float),
        sa.Column("answer", JSONB),
    )


def downgrade() -> None:
    op.drop_table("pulls")
