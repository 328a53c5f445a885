"""Isolation: whoever asks, by whatever verb, is told of its own alone.

Every public name of a principal, a session, its chains and its items is listed by
introspection: it writes, or it reads and is called here, as every user and every actor.
"""

import inspect
import types

import hypothesis
import pytest
from hypothesis import strategies as st

from kvmem import errors
from kvmem.session import Principal, Session, SessionStore
from kvmem.session.chains import Chains
from kvmem.session.items import Items

ACTOR_A, ACTOR_B = "actor-a", "actor-b"
TEXT, QUERY = "Tea is taken green in this house.", "green tea house marker"

# How each read is called: with a principal, and the actor that asks (or None).
READS = {
    Principal: {
        "account": lambda me, _: me.account,
        "actor": lambda me, _: me.actor,
        "actor_of": lambda me, actor: me.actor_of(actor),
        "captured": lambda me, actor: me.captured("s", actor=actor),
        "folder": lambda me, _: me.folder,
        "items": lambda me, actor: me.items.list(actor=actor),
        "owner": lambda me, _: me.owner,
        "recall": lambda me, actor: me.recall(QUERY, limit=50, actor=actor),
        "require_actor": lambda me, _: me.require_actor,
        "salt": lambda me, actor: me.salt(actor).hex(),
        "session": lambda me, _: me.session("s"),
        "sessions": lambda me, _: me.sessions(),
        "store": lambda me, _: type(me.store),
        "supports_request_actor_peer": lambda me, _: me.supports_request_actor_peer,
        "user": lambda me, _: me.user,
    },
    Session: {
        "chains": lambda me, actor: me.session("s").chains.get(actor),
        "clock": lambda me, _: me.session("s").clock,
        "exists": lambda me, _: me.session("s").exists,
        "id": lambda me, _: me.session("s").id,
        "ledger": lambda me, actor: me.session("s").ledger(actor),
        "live": lambda me, _: me.session("s").live(),
        "messages": lambda me, _: me.session("s").messages(),
        "meta": lambda me, _: me.session("s").meta(),
        "recalled": lambda me, actor: me.recall(
            QUERY, session=me.session("s"), limit=50, actor=actor
        ),
    },
    Chains: {
        "get": lambda me, actor: me.session("s").chains.get(actor),
        "fault": lambda me, actor: me.session("s").chains.fault(actor),
        "actors": lambda me, _: me.session("s").chains.actors(),
    },
    Items: {
        "get": lambda me, actor: _each(me, actor, me.items.get),
        "list": lambda me, actor: me.items.list(actor=actor),
        "names": lambda me, actor: [
            me.items.names(under, actor) for under in ("", "peers", "memories")
        ],
        "search": lambda me, actor: me.items.search(QUERY, 50, actor=actor),
        "stat": lambda me, actor: _each(me, actor, me.items.stat),
    },
}
WRITES = {
    Principal: {"acting_as", "capture", "forget", "remember"},
    Session: {"append", "append_captured", "commit", "create", "delete"},
    Chains: {"drop", "put"},
    Items: {"delete", "forget", "move", "put", "remember"},
}
# A session is its user's, whatever the actor: these tell all actors of one user.
OF_THE_USER = {"sessions", "live", "messages", "clock", "meta", "actors", "chains_of"}
# Plain handles of a store, and what only a principal's handles can be passed to.
STORE = {
    "open",
    "principal",
    "place",
    "book",
    "fsck",
    "close",
    "nameless",
    "session_ids",
}


def _each(me, actor, verb):
    """Call a verb with every uri of the user's; what is denied says nothing."""
    said = []
    for item in me.items.list():
        try:
            said.append(verb(item.uri, actor=actor))
        except errors.Denied:
            said.append("denied")
    return said


def names_of(kind: type) -> set[str]:
    fields = getattr(kind, "__dataclass_fields__", {})
    found = {*dir(kind), *fields} | set(inspect.get_annotations(kind))
    return {name for name in found if not name.startswith("_")}


@pytest.mark.parametrize("kind", READS)
def test_every_public_name_reads_or_writes_and_every_read_is_tried(kind):
    plain = {"place", "principal"} if kind is Session else set()
    assert names_of(kind) - plain == set(READS[kind]) | WRITES[kind]


@pytest.mark.case("SES-02")
def test_a_store_has_no_way_to_what_users_hold_but_their_principals():
    assert {
        n for n in names_of(SessionStore) if callable(getattr(SessionStore, n))
    } <= (STORE)
    for name in ("recall", "search", "items", "messages", "remember", "list"):
        assert not hasattr(SessionStore, name)


def _filled(me, secret: str, actors, steps) -> list[str]:
    """Fill a user's memory with equal texts and with words of its own.

    Returns:
        What only this user may be told.
    """
    session, own = me.session("s"), []
    for verb in ("remember", "append", "recall", *steps):
        if verb == "remember":
            own.append(me.remember(TEXT).uri)
            own.append(me.remember(f"green tea marker {secret}").uri)
        elif verb == "append":
            session.append([{"role": "user", "content": f"{TEXT} {secret}"}])
        elif verb == "recall":
            for actor in actors:
                own.append(me.recall(QUERY, session=session, actor=actor).id)
        elif verb == "commit":
            session.commit()
    own += [message.id for message in session.messages()]
    return [secret, *own]


@pytest.mark.case("SES-01", "SES-02", "SES-25")
@hypothesis.given(
    st.lists(st.sampled_from(["remember", "append", "recall", "commit"]), max_size=4)
)
@hypothesis.settings(max_examples=6)
def test_users_with_equal_texts_and_session_ids_see_nothing_of_each_other(
    tmp_path_factory, steps
):
    root = tmp_path_factory.mktemp("root")
    store = SessionStore.open(root, durability="process")
    users = {
        ("lab", "ann"): "secretann",
        ("lab", "bob"): "secretbob",
        ("home", "ann"): "secrethome",
    }
    own = {
        owner: _filled(store.principal(*owner), secret, (None, ACTOR_A), steps)
        for owner, secret in users.items()
    }
    for owner in users:
        me = store.principal(*owner)
        others = [word for o, words in own.items() if o != owner for word in words]
        for kind, reads in READS.items():
            for name, read in reads.items():
                for actor in (None, ACTOR_A):
                    said = repr(read(me, actor))
                    leaked = [word for word in others if word in said]
                    assert leaked == [], (owner, kind.__name__, name)
        assert users[owner] in repr(me.session("s").messages())
        assert users[owner] in repr(me.items.list())
    store.close()


@pytest.mark.case("SES-02", "SES-14")
def test_actors_of_one_user_see_nothing_of_each_other(me):
    session = me.session("s")
    for actor in (ACTOR_A, ACTOR_B):
        me.remember(TEXT, peer=actor)
        me.remember(f"green tea marker secret{actor}", peer=actor)
        me.recall(QUERY, session=session, actor=actor)
        me.capture("s", [{"role": "user", "content": actor}], 0, actor=actor)
        session.chains.put(actor, f"secret{actor}".encode(), 0)
    for asking, other in ((ACTOR_A, ACTOR_B), (ACTOR_B, ACTOR_A), (None, ACTOR_A)):
        for kind, reads in READS.items():
            for name, read in reads.items():
                is_owners = asking is None and kind is not Principal
                if (
                    name in OF_THE_USER
                    or is_owners
                    or (asking, name) == (None, "items")
                ):
                    continue
                said = repr(read(me, asking))
                leaked = [w for w in (other, f"secret{other}") if w in said]
                assert leaked == [], (asking, kind.__name__, name)
        if asking:
            found = {hit.peer for hit in me.items.search(QUERY, actor=asking)}
            assert found == {asking}


@pytest.mark.case("SES-14")
def test_the_default_scope_is_the_self_and_the_named_actors_part(me):
    me.remember("green tea of the self")
    for actor in (ACTOR_A, ACTOR_B):
        me.remember(f"green tea of {actor}", peer=actor)

    def peers(**how):
        return {entry.peer for entry in me.recall("green tea", **how).entries}

    assert peers() == {None}
    assert peers(actor=ACTOR_A) == {None, ACTOR_A}
    assert peers(actor="unknown") == {None}
    assert peers(peer_scope="all") == {None, ACTOR_A, ACTOR_B}
    with me.acting_as(ACTOR_B):
        assert peers() == {None, ACTOR_B}
        assert peers(actor=ACTOR_A) == {None, ACTOR_A}


def test_a_retriever_that_forgets_the_view_does_not_break_it(tmp_path, told):
    leaky = told("memories/a", f"peers/{ACTOR_B}/memories/b", "peers/x/y")
    me = SessionStore.open(tmp_path, retriever=leaky).principal("lab", "ann")
    found = me.recall("tea", actor=ACTOR_A)
    assert [entry.uri for entry in found.entries] == ["memories/a"]
    everything = me.recall("tea", actor=ACTOR_A, peer_scope="all")
    assert len(everything.entries) == 3


def test_the_check_would_see_a_read_that_forgets_its_user(store):
    ann, bob = store.principal("lab", "ann"), store.principal("lab", "bob")
    own = _filled(ann, "secretann", (None,), ())
    wrong = types.SimpleNamespace(items=ann.items, owner=bob.owner)
    said = repr(READS[Items]["list"](wrong, None))
    assert any(word in said for word in own)
