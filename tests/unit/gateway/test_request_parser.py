"""Any body gives a request or one of Thaw's errors."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.http.parsing.request_parser import REQUESTS, check_model, parse
from services.gateway.http.parsing.validation import path_in
from shared.contracts.inference import Endpoint
from shared.errors import InvalidRequest, ThawError
from tests.support.examples import examples
from tests.support.fake_engine import card_of

CARDS = (card_of("m"), card_of("e", task="embed"))
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
JSON = st.recursive(SCALARS, lambda c: st.lists(c, max_size=3) | st.dictionaries(st.text(max_size=5), c, max_size=3), max_leaves=8)
NAMES = st.sampled_from(sorted({name for kind in REQUESTS.values() for name in kind.model_fields} | {"functions", "modalities"}))
MESSAGES = st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "x"]), "content": JSON}), max_size=2)
BODIES = st.dictionaries(NAMES, JSON, max_size=6).flatmap(
    lambda extra: st.fixed_dictionaries(
        {}, optional={"model": st.just("m"), "messages": MESSAGES, "prompt": JSON, "input": JSON}
    ).map(lambda base: extra | base)
)


@settings(max_examples=examples(400), deadline=None)
@given(endpoint=st.sampled_from(["chat", "completion", "embedding"]), body=BODIES)
def test_any_body_is_accepted_or_refused_with_a_4xx(endpoint: Endpoint, body: dict[str, Any]) -> None:
    try:
        parsed = parse(endpoint, json.dumps(body).encode())
        for card in CARDS:
            check_model(parsed, card)
    except ThawError as e:
        refusal = e
    else:
        return
    assert 400 <= refusal.status < 500
    assert refusal.message


@settings(max_examples=examples(200), deadline=None)
@given(st.binary(max_size=40) | st.sampled_from([b"[" * 5000, b'{"model":' * 500, b"null", b'{"model":"\\ud800","messages":[]}']))
def test_any_bytes_are_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse("chat", body)


@pytest.mark.parametrize(
    ("location", "path"),
    [
        (("messages", 0, "role"), "messages[0].role"),
        (("stop", "constrained-str"), "stop"),
        (("stop", "list[constrained-str]", 1), "stop[1]"),
        (("nothing",), "nothing"),
        ((), ""),
    ],
)
def test_error_paths_omit_union_branches(location: tuple[int | str, ...], path: str) -> None:
    assert path_in({"messages": [{"role": "x"}], "stop": ["a", ""]}, location) == path
