"""Record of an instance how many stages its group has on several nodes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("instances", sa.Column("stages", sa.Integer, nullable=False, server_default="1"))


def downgrade() -> None:
    op.drop_column("instances", "stages")
