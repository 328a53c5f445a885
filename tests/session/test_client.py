"""Clients: the verbs, answers and errors of a principal, over HTTP."""

import asyncio
import inspect

import pytest

from kvmem import errors
from kvmem.session import (
    Principal,
    Session,
    SessionStore,
    messages,
    resident,
    tokens,
)
from kvmem.session.client import AsyncClient, Client, RemoteSession

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(params=["process", "http"])
def user(request, me):
    """A principal, and a client of one."""
    if request.param == "process":
        return me
    return request.getfixturevalue("served").client("lab", "ann")


def test_a_conversation_is_the_same_in_process_and_over_http(user):
    session = user.session("s1")
    assert (session.clock, session.messages()) == (0, ())
    item = user.remember("Ann takes her tea green.", "memories/tea", key="k")
    assert user.remember("Ann takes her tea green.", "memories/tea", key="k") == item
    found = user.recall("what tea?", session=session)
    assert ([e.uri for e in found.entries], found.status) == (["memories/tea"], "new")
    assert found.rendered == "Ann takes her tea green."
    placed = session.append(HELLO, key="turn-1", peer="wang", carries=[found])
    assert placed[:3] == (0, 1, False)
    assert session.append(HELLO, key="turn-1", peer="wang", carries=[found])[2]
    again = user.recall("what tea?", session=session)
    assert (again.entries, again.status, again.cooled) == ((), "ok", 1)
    (message,) = session.messages()
    assert (message.peer, message.text, message.carries) == (
        "wang",
        "hello",
        (found.id,),
    )
    assert session.commit().status == "archived" and session.clock == 1
    assert user.forget("memories/tea") == ("memories/tea",)
    assert user.recall("what tea?").entries == ()
    session.delete()
    with pytest.raises(errors.Deleted):
        session.append(HELLO)


@pytest.mark.case("SES-32")
def test_what_is_forgotten_is_nowhere(user, me, store, request):
    session, words = user.session("s1"), "Ann's zebrafinch sings."
    uri = user.remember(words, key="k").uri
    found = user.recall("zebrafinch", session=session, request_id="q1")
    part = {"type": "context", "uri": uri, "text": words}
    session.append([{"role": "user", "content": ["hello", part]}], carries=[found])
    assert user.forget(uri) == (uri,)
    assert user.recall("zebrafinch").entries == ()
    assert user.recall("zebrafinch", session=session, request_id="q1").entries == ()
    assert [m.text for m in session.messages()] == ["hello"]
    with pytest.raises(errors.Deleted):
        user.remember(words, key="k")
    if user is not me:
        store = request.getfixturevalue("served").store
    assert store.principal("lab", "ann").session("s1").ledger() == {}
    files = [path for path in store.root.rglob("*") if path.is_file()]
    assert [p for p in files if b"zebrafinch" in p.read_bytes()] == []
    again = SessionStore.open(store.root).principal("lab", "ann")
    assert again.items.list() == again.items.search("zebrafinch") == ()
    assert user.forget(uri) == ()


def test_a_retry_under_one_request_id_is_answered_the_same(user):
    user.remember("Ann takes her tea green.", "memories/tea")
    first = user.recall("tea", session=user.session("s"), request_id="q1")
    again = user.recall("tea", session=user.session("s"), request_id="q1")
    assert again.entries == first.entries and again.status == "replayed"


def test_refusals_have_the_same_types(user):
    session = user.session("s")
    session.append(HELLO, key="k")
    for verb, kind in (
        (lambda: session.append(HELLO * 2, key="k"), errors.Conflict),
        (lambda: session.append([{"role": "nobody"}]), errors.ConfigError),
        (lambda: session.append(HELLO, carries=["none"]), errors.InvalidId),
        (lambda: session.append(HELLO, peer=" "), errors.InvalidId),
        (lambda: session.append([HELLO[0] | {"peer": 3}]), errors.ConfigError),
        (lambda: user.session("a/b"), errors.InvalidId),
        (lambda: user.remember("x", "../x"), errors.InvalidId),
        (lambda: user.recall("x", actor="a/b"), errors.InvalidId),
        (lambda: user.recall("x", peer_scope="everyone"), errors.ConfigError),
        (lambda: user.capture("s", HELLO, after=7), errors.Conflict),
        (lambda: user.recall("x", cooldown=messages(-1)), errors.ConfigError),
    ):
        with pytest.raises(kind):
            verb()


@pytest.mark.case("SES-26")
def test_an_actor_keeps_and_forgets_within_its_own_view(user):
    user.remember("green", "peers/B/memories/tea")
    for asked in (
        lambda: user.remember("x", peer="B"),
        lambda: user.remember("x", "peers/B/memories/x"),
        lambda: user.forget("peers/B/memories/tea"),
        lambda: user.forget("peers"),
    ):
        with user.acting_as("A"), pytest.raises(errors.Denied):
            asked()
    with user.acting_as("A"):
        assert user.remember("x", peer="A").peer == "A"
        assert user.remember("y").peer is None
    with pytest.raises(errors.Denied):
        user.forget("peers/B/memories/tea", actor="A")
    assert user.forget("peers/B/memories/tea", actor="B") == ("peers/B/memories/tea",)


def test_every_cooldown_but_a_resident_one_is_the_services_too(served):
    me = served.client("lab", "ann")
    me.remember("green tea")
    session = me.session("s")
    assert me.recall("tea", session=session, cooldown=tokens(50)).entries
    assert me.recall("tea", session=session, cooldown=tokens(50)).cooled == 1
    assert me.recall("tea", session=session, cooldown=messages(0)).status == "off"
    with pytest.raises(errors.ConfigError, match="resident"):
        me.recall("tea", session=session, cooldown=resident(lambda *_: ()))


def test_an_actor_of_a_call_wins_over_the_scope_and_that_over_the_clients(served):
    me = served.client("lab", "ann", actor="configured")
    assert me.recall("x").actor == "configured"
    with me.acting_as("scope"):
        assert me.recall("x").actor == "scope"
        assert me.recall("x", actor="call").actor == "call"
        with me.acting_as(None):
            assert me.recall("x").actor == "configured"
    with pytest.raises(errors.InvalidId):
        served.client("lab", "ann", actor="a/b")


def test_a_scope_of_one_client_does_not_touch_another(served):
    ann, bob = served.client("lab", "ann"), served.client("lab", "bob")
    with ann.acting_as("planner"):
        assert (ann.recall("x").actor, bob.recall("x").actor) == ("planner", None)


def test_a_long_session_comes_in_pages(served):
    session = served.client("lab", "ann").session("s")
    batch = [{"role": "user", "content": str(i)} for i in range(100)]
    for _ in range(11):
        session.append(batch)
    assert [m.seq for m in session.messages()] == list(range(1100))
    assert [m.seq for m in session.messages(since=1050)] == list(range(1050, 1100))


def test_the_async_client_has_the_same_verbs_awaited(served):
    key = served.key("lab", "ann")

    async def run():
        async with AsyncClient(served.url, key) as me:
            session = me.session("s")
            await session.append(HELLO, key="k")
            await me.remember("green tea")

            async def ask(actor):
                with me.acting_as(actor):
                    found = await me.recall("tea", session=session)
                return found.actor, len(found.entries)

            found = await asyncio.gather(*(ask(f"a{i}") for i in range(6)))
            with pytest.raises(errors.Conflict):
                await session.append(HELLO * 2, key="k")
            return found, await session.clock, await session.messages()

    found, clock, messages = asyncio.run(run())
    assert found == [(f"a{i}", 1) for i in range(6)]
    assert clock == len(messages) == 1


def test_a_message_is_said_by_the_actor_of_the_call(user):
    with user.acting_as("planner"):
        first = user.session("s").append(HELLO, key="k")
        assert user.session("s").append(HELLO, key="k") == first._replace(
            is_repeat=True
        )
    user.session("s").append(HELLO, actor="critic")
    user.session("s").append(HELLO)
    said = [message.actor for message in user.session("s").messages()]
    assert said == ["planner", "critic", None]


def test_a_deleted_session_may_be_made_anew(user):
    session = user.session("s")
    session.append(HELLO)
    session.delete()
    with pytest.raises(errors.Deleted, match="create"):
        user.session("s").append(HELLO)
    assert user.session("s").create() is True
    assert user.session("s").create() is False
    assert user.session("s").append(HELLO).first == 0


def test_a_session_of_another_users_client_is_refused(served):
    ann, bob = served.client("lab", "ann"), served.client("lab", "bob")
    with pytest.raises(errors.Denied, match="another key"):
        ann.recall("tea", session=bob.session("theirs"))
    assert served.store.principal("lab", "ann").sessions() == ()
    twin = Client(served.url, ann._headers["Authorization"].split()[1])
    assert ann.recall("tea", session=twin.session("mine")).status == "new"
    twin.close()


@pytest.mark.parametrize("value", [float("nan"), "\ud83d", {1, 2}])
def test_what_no_json_can_say_is_refused_before_it_is_sent(served, value):
    user, part = served.client("lab", "ann"), {"type": "x", "v": value}
    with pytest.raises(errors.ConfigError, match="JSON"):
        user.session("s").append([{"role": "user", "content": [part]}])
    assert user.session("s").clock == 0


@pytest.mark.parametrize(
    ("remote", "local"), [(Client, Principal), (RemoteSession, Session)]
)
def test_a_clients_verbs_take_the_arguments_of_the_principals(remote, local):
    verbs = [n for n in dir(remote) if not n.startswith("_") and n != "close"]
    for name in verbs:
        theirs, ours = getattr(remote, name), getattr(local, name, None)
        if not callable(theirs):
            continue
        known = set(inspect.signature(ours).parameters)
        assert set(inspect.signature(theirs).parameters) <= known | {"id_"}, name
    assert Client.supports_request_actor_peer is AsyncClient.supports_request_actor_peer
    assert set(dir(Client)) - {"close"} == set(dir(AsyncClient)) - {
        "close",
        "is_async",
        "__aenter__",
        "__aexit__",
    } | {"__enter__", "__exit__"}
