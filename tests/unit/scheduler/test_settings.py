"""Invalid settings of the scheduler."""

from __future__ import annotations

import pytest
from pydantic import SecretStr, ValidationError

from services.scheduler.settings import SchedulerSettings
from shared.policies import DEFAULT_POLICY, policy_names
from simulator.policies import PROFILES


@pytest.mark.parametrize("url", ["mysql://thaw:hidden@host/thaw", "host:5432", "postgresql://", ""])
def test_database_url_that_is_not_postgresql_is_refused(url: str) -> None:
    with pytest.raises(ValidationError, match="write postgresql://") as caught:
        SchedulerSettings(database_url=SecretStr(url))
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+asyncpg"])
def test_postgresql_database_url_is_accepted(scheme: str) -> None:
    url = f"{scheme}://thaw@host/thaw"
    assert SchedulerSettings(database_url=SecretStr(url)).database_url.get_secret_value() == url


def test_unknown_policy_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"no scheduling policy 'lur'; there are thaw, .*lru"):
        SchedulerSettings(policy="lur")


def test_policy_is_set_by_its_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THAW_POLICY", "lru")
    assert SchedulerSettings().rules().profile.name == "lru"


def test_policy_names_equal_those_of_thaw_yaml() -> None:
    assert sorted(PROFILES) == sorted(policy_names())
    assert SchedulerSettings().policy == DEFAULT_POLICY
