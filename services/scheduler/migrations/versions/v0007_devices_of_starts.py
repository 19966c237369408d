"""Record the devices of cold starts, whose seconds have prices."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("cold_waits", sa.Column("device_kind", sa.Text, nullable=False, server_default=""))
    op.add_column("cold_waits", sa.Column("devices", sa.Integer, nullable=False, server_default="1"))


def downgrade() -> None:
    for column in ("device_kind", "devices"):
        op.drop_column("cold_waits", column)
