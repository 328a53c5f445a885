"""The vectors of identity and actors (A01 to A14), run from the data."""

import asyncio
import contextlib
import contextvars
import json
import pathlib
import threading
import types

import httpx
import pytest

from kvmem import errors
from kvmem.session import SessionStore, actors, ids, middleware, views
from kvmem.session.capture import Capture
from kvmem.session.client import AsyncClient
from kvmem.session.keys import KeyRing
from kvmem.session.search import Hit
from kvmem.session.service import create_app

_LINES = (pathlib.Path(__file__).parent / "vectors.jsonl").read_text().splitlines()
VECTORS = {v["id"]: v for v in map(json.loads, _LINES) if v["id"].startswith("A")}
OWNER = ("acct", "user")


def vector(id_: str):
    """Give a test the data of one vector."""
    return pytest.mark.parametrize("data", [VECTORS[id_]], ids=[id_])


def test_every_vector_of_identity_has_a_test():
    tested = pathlib.Path(__file__).read_text()
    assert sorted(VECTORS) == [f"A{i:02d}" for i in range(1, 15)]
    assert [id_ for id_ in VECTORS if f'@vector("{id_}")' not in tested] == []


@vector("A01")
def test_scopes_nest_are_trimmed_and_end_with_an_exception(data):
    stack = contextlib.ExitStack()
    opened = [stack]
    for verb, *value in data["steps"]:
        if verb == "in":
            opened.append(contextlib.ExitStack())
            opened[-1].enter_context(actors.acting_as(value[0], OWNER))
        elif verb == "out":
            opened.pop().close()
        elif verb == "raise_out":
            with pytest.raises(ZeroDivisionError), opened.pop():
                raise ZeroDivisionError
        elif verb == "is":
            assert actors.scoped(OWNER) == value[0]
        else:
            assert (verb, value, actors.scoped(OWNER)) == ("scope", [None], None)
    assert opened == [stack]


@vector("A02")
def test_bad_actors_are_refused_each_with_its_error(data, me):
    kinds = {"TypeError": TypeError, "ValueError": ValueError}
    for bad, name in data["bad_actor"]:
        kind = kinds.get(name) or getattr(errors, name)
        with pytest.raises(kind), me.acting_as(bad):
            pass
        with pytest.raises(kind):
            me.recall("tea", actor=bad)


@vector("A03")
def test_the_actor_of_a_request_is_the_tasks_and_its_user_the_keys(data, tmp_path):
    ring = KeyRing(tmp_path)
    key, seen = ring.add("acct", "user"), []
    app = create_app(SessionStore.open(tmp_path), ring)

    class Recording(httpx.ASGITransport):
        async def handle_async_request(self, request):
            await asyncio.sleep(0.001)  # the other task's turn
            token = request.headers["authorization"].split()[1]
            found = ring.find(token)
            actor = request.headers["x-kvmem-actor"]
            seen.append([found.account, found.user, actor])
            return await super().handle_async_request(request)

    async def run():
        http = httpx.AsyncClient(transport=Recording(app), base_url="http://kvmem")
        async with AsyncClient("", key, "configured-assistant", http=http) as me:

            async def find(actor):
                with me.acting_as(actor):
                    return await me.recall("tea")

            await asyncio.gather(*(find(step[2]) for step in data["par"]))
            assert data["then"] == ["find"]
            await me.recall("tea")

    asyncio.run(run())
    assert sorted(seen[:2]) + seen[2:] == data["expect"]


def history(words):
    """Return a history whose messages have ids, as an agent's have."""
    roles = {"a": "assistant"}
    return [
        {"id": w, "role": roles.get(w[0], "user"), "content": f"says {w}"}
        for w in words
    ]


@pytest.mark.parametrize("where", ["process", "http"])
@pytest.mark.parametrize(
    "data", [VECTORS["A04"], VECTORS["A11"]], ids=["A04", "A11"]
)  # @vector("A04") @vector("A11")
def test_captures_are_kept_apart_and_survive_a_restart(data, where, store, request):
    if where == "http":
        me = request.getfixturevalue("served").client("lab", "ann")
    else:
        me = store.principal("lab", "ann")
    capture, num_sent = Capture(me, actor_resolver=lambda runtime: runtime), 0
    for verb, *rest in data["steps"]:
        if verb == "reopen":  # everything that was in memory is gone
            if where == "process":
                store = SessionStore.open(store.root)
                me = store.principal("lab", "ann")
            capture = Capture(me, actor_resolver=lambda runtime: runtime)
            continue
        words, how, expected = rest
        pushed = capture.push(history(words), how["actor"], session=how["session"])
        assert (pushed.actor, pushed.sent) == (how["actor"], expected["sent"])
        num_sent += pushed.sent
    assert len(me.session("t").messages()) == num_sent


@vector("A05")
def test_a_resolver_that_answers_none_clears_the_scope(data, me):
    for what, ambient, expected in data["cases"]:
        resolvers = {
            "no_resolver": None,
            "resolver None": lambda _: None,
            "resolver Y": lambda _: "Y",
        }
        capture = Capture(me, actor_resolver=resolvers[what])
        with me.acting_as(ambient.removeprefix("ambient ")):
            pushed = capture.push(history(["h"]), session=f"s-{what}")
            assert pushed.actor == expected
            (message,) = me.session(f"s-{what}").messages()
            assert message.actor == expected
            assert me.actor == "X"


@vector("A06")
def test_a_transport_without_the_flag_is_refused_when_a_resolver_is_given(data, me):
    kinds = {what: kind for what, kind in data["refuse_at_construction"]}
    silent = types.SimpleNamespace(acting_as=me.acting_as, capture=me.capture)
    truthy = types.SimpleNamespace(supports_request_actor_peer="yes")
    assert kinds["transport without support flag + resolver"] == "ValueError"
    assert kinds["retriever transport without flag"] == "ValueError"
    for transport in (silent, truthy):
        with pytest.raises(ValueError, match="supports_request_actor_peer"):
            Capture(transport, actor_resolver=lambda _: None)
    Capture(silent)  # nothing is resolved, nothing can be lost


@vector("A07")
def test_item_verbs_under_a_view(data, store):
    account, user, actor = data["as"]
    owner = store.principal(account, user).items
    for peer in ("wang", "zhang"):
        for kind in ("memories", "resources"):
            owner.put(f"peers/{peer}/{kind}/profile.md", f"{peer} likes tea")
    owner.put("peers/wang/x", "wang likes tea")
    items = ViewOf(owner, actor)
    for verb, target, expected in data["ops"]:
        if expected == "Denied":
            with pytest.raises(errors.Denied):
                getattr(items, verb)(target)
        elif expected != "ok":
            assert getattr(items, verb)(target) == expected
        else:
            getattr(items, verb)(target)
    assert len(owner.list()) == 6


class ViewOf:
    """The words of the vector, each a verb of items."""

    def __init__(self, items, actor):
        self.items, self.actor = items, actor

    def ls(self, uri):
        return list(self.items.names(uri, self.actor))

    def read(self, uri):
        return self.items.get(uri, self.actor)

    def stat(self, uri):
        return self.items.stat(uri, self.actor)

    def write(self, uri):
        return self.items.put(uri, "new", self.actor)

    def mv(self, pair):
        return self.items.move(*pair.split("->"), self.actor)

    def rm(self, uri):
        return self.items.delete(uri, self.actor)

    def search(self, uri):
        return self.items.search("tea", under=uri, actor=self.actor)

    def search_targets(self, uri):
        hits = self.search(uri)
        found = {hit.uri.rpartition("/")[0] for hit in hits} - {"peers/wang"}
        return sorted(found)


@vector("A08")
def test_origins_are_ranked_under_each_peer_scope(data):
    uris = {"self": "memories/self"}
    hits = [
        Hit(uris.get(origin, f"{origin}/memories/x"), "", score)
        for origin, score in data["hits"]
    ]
    for scope in ("all", "actor"):
        ranked = views.ranked(hits, data["as"][2], scope)
        found = [
            "self" if h.peer_of is None else f"peers/{h.peer_of}"
            for h in (
                types.SimpleNamespace(peer_of=views.peer_of(h.uri)) for h in ranked
            )
        ]
        assert found == data[scope]


@vector("A09")
@pytest.mark.case("SES-01")
def test_a_session_of_one_name_is_each_users_own(data, store):
    for who, (verb, session, *more) in ((step[0:2], step[2]) for step in data["steps"]):
        assert who[0] == "as"
        handle = store.principal(*who[1][:2]).session(session)
        if verb == "create":
            assert handle.create()
        elif verb == "get":
            assert more == [404] and not handle.exists and handle.messages() == ()
        elif verb == "msg":
            handle.append([{"role": "user", "content": "hello"}] * more[0])
        else:
            assert handle.meta().items() >= more[0].items()


@vector("A10")
def test_ledgers_are_an_actors_own(data, tmp_path, told):
    store = SessionStore.open(tmp_path, retriever=told("M"))
    session = None
    for step in data["steps"]:
        if step[0] == "ledger":
            actor = step[1].partition("@")[2] or None
            found = {u: r.turn for u, r in session.ledger(actor).items()}
            assert found == step[2]
            continue
        (account, user, actor), (verb, id_, how, expected) = step[1:]
        assert (verb, how) == ("recall", {})
        session = store.principal(account, user).session(id_)
        found = session.principal.recall("tea", session=session, actor=actor)
        said = {"entries": [e.uri for e in found.entries], "status": found.status}
        assert (said | {"cooled": found.cooled}).items() >= expected.items()


@vector("A12")
def test_a_worker_thread_without_an_actor_fails_loudly(data, store):
    (_, how), (where, verb, id_, expected) = data["steps"]
    me = store.principal("lab", "ann", **how)
    caught = []

    def work():
        try:
            getattr(me, verb)("tea", session=me.session(id_))
        except errors.KVMemError as error:
            caught.append(type(error).__name__)

    with me.acting_as("planner"):
        target = contextvars.Context().run
        thread = threading.Thread(target=target, args=(work,))
        thread.start()
        thread.join()
        assert me.recall("tea").actor == "planner"
    assert (where, caught) == ("thread", [expected["err"]])


@vector("A13")
def test_nobody_changes_a_principals_user(data, me):
    for verb, what, *rest in data["steps"]:
        if verb == "setattr":
            name = what.removeprefix("principal.")
            with pytest.raises(AttributeError):
                setattr(me, name, rest[0])
            assert rest[1] == "AttributeError" and me.owner == ("lab", "ann")
        else:  # what a resolver of the middleware is given
            assert (verb, what, rest) == ("resolver_arg_has", "state", [False])
            assert not hasattr(middleware.ServerRuntime(), "state")


@vector("A14")
@pytest.mark.case("SES-04", "SES-05")
def test_session_ids_are_refused_or_kept_apart(data, me, tmp_path):
    written = {"x*300": "x" * 300, "é(NFD)": "e\u0301"}
    for bad in data["session_ids_refused"]:
        with pytest.raises(errors.InvalidId):
            me.session(written.get(bad, bad))
    for pair in data["distinct_must_not_collide"]:
        assert len({ids.to_path(name).casefold() for name in pair}) == 2
    names = {name for pair in data["distinct_must_not_collide"] for name in pair}
    for name in names:
        me.session(name).append([{"role": "user", "content": name}])
    for name in names:
        (message,) = me.session(name).messages()
        assert message.text == name
    assert set(me.sessions()) == names
