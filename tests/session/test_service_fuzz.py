"""Whatever a body holds, the service answers it or says what is wrong with it."""

import asyncio
import dataclasses

import httpx
import hypothesis
import pytest
from hypothesis import strategies as st

from kvmem.session import SessionStore
from kvmem.session.keys import KeyRing
from kvmem.session.service import Limits, create_app, verbs

_NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
_JSON = st.recursive(
    st.none() | st.booleans() | _NUMBERS | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
_PARTS = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "context", "x"])},
    optional={"text": _JSON, "uri": _JSON},
)
_MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "tool", "nobody"])},
        optional={
            "content": st.text() | st.lists(_PARTS, max_size=2) | _JSON,
            "id": _JSON,
            "sources": _JSON,
            "peer": _JSON,
        },
    ),
    max_size=3,
)
_LIKELY = {
    "messages": _MESSAGES,
    "after": st.integers(-1, 3),
    "keep": st.integers(-1, 3),
    "limit": st.integers(-1, 200) | st.none(),
    "mark": st.sampled_from(["return", "append", "x"]),
    "cooldown": st.sampled_from(["messages(3)", "tokens(0)", "resident", "turns(1)x"]),
    "peer_scope": st.sampled_from(["actor", "all", "x", None]),
    "session": st.sampled_from(["s", "", "a/b", "\u2028", None]),
}


def bodies_of(kind: type) -> st.SearchStrategy:
    """Return bodies of this kind, most of them nearly right."""
    fields = {
        field.name: _LIKELY.get(field.name, st.text(max_size=9) | st.none()) | _JSON
        for field in dataclasses.fields(kind)
    }
    return (
        st.fixed_dictionaries({}, optional=fields | {"account": st.just("x")}) | _JSON
    )


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """An app in this process, and a key of a user."""
    root = tmp_path_factory.mktemp("root")
    store, ring = SessionStore.open(root, durability="process"), KeyRing(root)
    app = create_app(store, ring, Limits(requests_per_s=1e6))
    yield app, {"Authorization": f"Bearer {ring.add('lab', 'ann')}"}
    store.close()


@pytest.mark.parametrize("verb", [v for v in verbs.ALL if v.body], ids=lambda v: v.name)
def test_no_body_is_a_fault_of_the_service(service, verb):
    app, key = service

    @hypothesis.given(bodies_of(verb.body))
    @hypothesis.settings(max_examples=25)
    def run(body):
        async def send():
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://k") as h:
                path = verb.path.format(session="s")
                return await h.request(verb.method, path, json=body, headers=key)

        answer = asyncio.run(send())
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 400:
            assert answer.headers["content-type"] == "application/problem+json"

    run()
