"""A mesh shared by all modules, except those that start their own.

After every test booked memory equals used memory, and no process or segment is left over.
"""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.support.mesh import Victim
from tests.support.paced_zygote import Pace


@pytest.fixture(scope="package")
def pace(tmp_path_factory: pytest.TempPathFactory) -> Pace:
    """Return the pace of the shared mesh's engines."""
    return Pace(tmp_path_factory.mktemp("pace"))


@pytest.fixture(scope="package")
def mesh(pace: Pace) -> Iterator[Victim]:
    victim = Victim(**pace.environment)
    try:
        victim.begin()
        yield victim
    finally:
        victim.close()


@pytest.fixture(autouse=True)
def balanced_books(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "mesh" in request.fixturenames:
        victim: Victim = request.getfixturevalue("mesh")
        victim.assert_settled()


@pytest.fixture
def client(mesh: Victim) -> Iterator[openai.OpenAI]:
    """The standard client, with the retries it has by default."""
    with openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="none", timeout=90) as client:
        yield client
