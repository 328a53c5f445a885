"""What is forgotten between a recall and the message that tells it is not told."""

import threading

import pytest

from kvmem.session import Hit, SessionStore, messages, unnamed

TEA = "Ann's zebrafinch takes her tea green."


def message_of(found, text="tea?"):
    parts = [{"type": "context", "uri": e.uri, "text": e.text} for e in found.entries]
    return [{"role": "user", "content": [text, *parts]}]


def holding(root) -> list:
    files = [path for path in root.rglob("*") if path.is_file()]
    return [path for path in files if b"zebrafinch" in path.read_bytes()]


@pytest.mark.parametrize("mark", ["append", "return"])
@pytest.mark.parametrize("by", ["this process", "another"])
def test_a_carried_memory_that_was_forgotten_meanwhile_is_a_mark(me, store, mark, by):
    me.remember(TEA, "memories/tea")
    session = me.session("s")
    found = me.recall("tea", session=session, mark=mark)
    other = SessionStore.open(store.root).principal("lab", "ann")
    assert (me if by == "this process" else other).forget("memories/tea")
    session.append(message_of(found), key="k", carries=[found])
    assert holding(store.root) == []
    (message,) = session.messages()
    assert message.parts[1] == {"type": "context", "forgotten": True}
    assert (message.said, session.ledger()) == ("tea?", {})
    assert store.fsck(session) == ()
    assert session.append(message_of(found), key="k", carries=[found]).is_repeat


def test_a_carried_memory_that_is_there_is_told(me, store):
    """The twin: the search above finds what is not taken out."""
    me.remember(TEA, "memories/tea")
    found = me.recall("tea", session=me.session("s"), mark="append")
    me.session("s").append(message_of(found), carries=[found])
    assert len(holding(store.root)) >= 2  # the item and the log


@pytest.mark.parametrize("is_moved", [False, True])
def test_a_history_that_tells_what_was_forgotten_is_captured_without_it(
    me, store, is_moved
):
    me.remember(TEA, "memories/tea")
    found = me.recall("tea")
    uri = "memories/tea"
    if is_moved:
        uri = me.items.move(uri, "memories/drinks/tea").uri
    me.forget(uri)
    assert me.capture("s", message_of(found), after=0) == 1
    assert holding(store.root) == []
    (message,) = me.session("s").messages()
    assert message.parts[1] == {"type": "context", "forgotten": True}


def test_what_is_no_item_or_one_again_is_told(me):
    mine = {"type": "context", "uri": "notes/1", "text": "from elsewhere"}
    me.remember(TEA, "memories/tea")
    me.forget("")
    me.remember("Tea is at ten.", "memories/tea")
    found = me.recall("tea", cooldown=messages(0))
    (message,) = message_of(found)
    message["content"].append(mine)
    me.session("s").append([message], carries=[found])
    assert [part.get("text") for part in me.session("s").messages()[0].parts] == [
        "tea?",
        "Tea is at ten.",
        "from elsewhere",
    ]


def test_a_retriever_that_cannot_say_takes_nothing_out(tmp_path, told):
    me = SessionStore.open(tmp_path, retriever=told("a")).principal("lab", "ann")
    me.store.retriever.hits = [Hit("a", "words", 0.5)]
    found = me.recall("x")
    me.session("s").append(message_of(found), carries=[found])
    assert me.session("s").messages()[0].parts[1]["text"] == "words"


def test_forgetting_and_telling_at_the_same_time_leave_nothing(me, store):
    other = SessionStore.open(store.root).principal("lab", "ann")
    for i in range(8):
        me.remember(f"{TEA} {i}", f"memories/{i}")
        found = me.recall("tea", session=me.session("s"), cooldown=messages(0))
        thread = threading.Thread(target=other.forget, args=(f"memories/{i}",))
        thread.start()
        me.session("s").append(message_of(found), carries=[found])
        thread.join()
        assert holding(store.root) == []
        store.recent.forget(me.owner)


@pytest.mark.parametrize("verb", ["forget", "delete"])
def test_without_who_frees_pages_a_chain_goes_and_it_is_noted(me, store, verb):
    session = me.session("s")
    session.append([{"role": "user", "content": "hello"}])
    session.chains.put(None, b"tea", 0)
    me.session("t").append([{"role": "user", "content": "hello"}])
    me.session("t").delete()
    assert unnamed.last(store.root, store.io) == b""  # no pages: nothing to be freed
    me.remember(TEA, "memories/tea")
    me.forget("memories/tea") if verb == "forget" else session.delete()
    first = unnamed.last(store.root, store.io)
    assert first and not list(store.root.rglob("*.chain"))
    if verb == "forget":
        assert session.chains.get() == (None, 0)
        me.forget("memories/tea")  # a turn of others may have left pages without one
        assert unnamed.last(store.root, store.io) not in (b"", first)
        assert store.fsck(session) == ()
    assert [p.name for p in store.root.iterdir() if "unnamed" in p.name] == [".unnamed"]


def test_with_who_frees_pages_a_chain_is_left_to_them(me, store):
    store.on_forget.append(lambda principal, uri: None)
    me.session("s").append([{"role": "user", "content": "hello"}])
    me.session("s").chains.put(None, b"tea", 0)
    me.remember(TEA, "memories/tea")
    me.forget("memories/tea")
    assert me.session("s").chains.get() == (b"tea", 1)
    assert unnamed.last(store.root, store.io) == b""


def test_a_chain_of_what_was_forgotten_meanwhile_is_not_put(me):
    session = me.session("s")
    session.append([{"role": "user", "content": "hello"}])
    with pytest.raises(Exception, match="forgotten meanwhile"):
        session.chains.put(None, b"tea", 0, lambda: True)
    assert session.chains.get() == (None, 0)
