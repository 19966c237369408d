"""Record what engines charge to requests, beside what gateways record of it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "device_accounts",
        sa.Column("model", sa.Text, primary_key=True),
        sa.Column("device_kind", sa.Text, primary_key=True),
        sa.Column("charged_us", sa.BigInteger, nullable=False),
        sa.Column("recorded_us", sa.BigInteger, nullable=False),
        sa.Column("unrecorded_us", sa.BigInteger, nullable=False),
        sa.Column("hour", sa.Integer, nullable=False),
    )
    # What engines had charged before is in no account.
    op.execute("INSERT INTO held_clocks (node, until) VALUES ('/accounts', extract(epoch FROM now()))")


def downgrade() -> None:
    op.execute("DELETE FROM held_clocks WHERE node = '/accounts'")
    op.drop_table("device_accounts")
