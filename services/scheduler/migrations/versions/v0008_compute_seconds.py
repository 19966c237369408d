"""Record the time that devices computed for requests."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None
_COLUMNS = ("compute_cpu_us", "compute_cuda_us")


def upgrade() -> None:
    for column in _COLUMNS:
        op.add_column("usage", sa.Column(column, sa.BigInteger, nullable=False, server_default="0"))


def downgrade() -> None:
    for column in _COLUMNS:
        op.drop_column("usage", column)
