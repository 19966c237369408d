"""The scheduler's schema revision, and its errors when PostgreSQL refuses its login."""

from __future__ import annotations

import asyncpg
import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy.exc import DBAPIError

from services.scheduler.adapters import database
from services.scheduler.adapters.database import refused_login

WRONG_PASSWORD = asyncpg.InvalidPasswordError('password authentication failed for user "thaw"')


@pytest.mark.parametrize(
    "error",
    [
        WRONG_PASSWORD,
        DBAPIError("SELECT 1", None, WRONG_PASSWORD),
        asyncpg.InvalidCatalogNameError('database "thaw" does not exist'),
    ],
)
def test_refused_login_error_names_the_setting_to_correct(error: Exception) -> None:
    text = refused_login(error)
    assert text is not None
    assert "THAW_DATABASE_URL" in text
    assert "password" in text


@pytest.mark.parametrize("error", [ConnectionRefusedError("gone"), asyncpg.CannotConnectNowError("starting"), TimeoutError()])
def test_other_trouble_is_no_refusal(error: Exception) -> None:
    assert refused_login(error) is None


def test_the_newest_revision_is_that_of_the_migrations() -> None:
    config = Config()
    config.set_main_option("script_location", str(database._MIGRATIONS))
    config.set_main_option("path_separator", "os")
    assert ScriptDirectory.from_config(config).get_current_head() == database.NEWEST_REVISION
