"""Forgetting: a memory that is forgotten is nowhere, in no file and no handle."""

import pytest

from kvmem.errors import Busy, CorruptPage, Denied
from kvmem.session import SessionStore, forget, ledger, messages, resident
from kvmem.session.forget import Memory
from kvmem.session.items import Retriever
from kvmem.session.place import LEDGER, LOG

WORDS = "Ann hides her tea behind the lantern"


def holders(root) -> list[str]:
    """Return the files below a root that hold the memory's words or its uri."""
    return [
        str(path.relative_to(root))
        for path in root.rglob("*")
        if path.is_file() and b"behind the lantern" in path.read_bytes()
    ]


@pytest.fixture
def me(tmp_path):
    store = SessionStore.open(tmp_path / "root")
    yield store.principal("lab", "ann")
    store.close()


@pytest.fixture
def spread(me):
    """A memory that is everywhere: ledger, answers, log, archive, torn files."""
    item = me.remember(WORDS, uri="memories/tea")
    me.remember("Ann likes lanterns", uri="memories/lamp")
    context = {"type": "context", "uri": item.uri, "text": item.text}
    for name in ("s", "t"):
        session = me.session(name)
        first = me.recall(
            "tea lanterns", session=session, request_id="q1", actor="planner"
        )
        second = me.recall(
            "tea lanterns", session=session, request_id="q2", mark="append"
        )
        for _ in range(2):
            said = [{"role": "user", "content": ["Where is it?", context]}]
            session.append(said, carries=[second, first])
            session.commit() if name == "s" else None
        session.append([{"role": "user", "content": ["Again.", context]}])
        session.place.file("messages.torn-0").write_bytes(f"{{{WORDS}".encode())
        session.place.file(".recall_log.bad-0").write_bytes(f"{{{WORDS}".encode())
        session.place.file("messages.jsonl.tmp").write_bytes(WORDS.encode())
    history = me.session("s").place.file("history")
    (history / ".new-archive").mkdir()
    (history / ".new-archive" / LOG).write_text(WORDS)
    (history / "archive_000" / "messages.jsonl.tmp").write_text(WORDS)
    gone = me.session("t").place.parent / ".gone-old"
    gone.mkdir()
    (gone / LOG).write_text(WORDS)
    return item


@pytest.mark.case("SES-32")
def test_a_forgotten_memory_is_nowhere(me, spread):
    handle = me.session("s")
    assert len(holders(me.store.root)) > 10, holders(me.store.root)
    told = []
    me.store.on_forget.append(lambda *each: told.append(each))
    assert me.forget(spread.uri) == (spread.uri,)
    assert told == [(me, spread.uri)]
    place = handle.place
    assert "behind the lantern" not in str(
        (place.logs, place.ledgers, me.store.recent.__dict__)
    )
    me.store.close()
    assert holders(me.store.root) == []
    again = SessionStore.open(me.store.root).principal("lab", "ann")
    for principal in (me, again):
        assert spread.uri not in [h.uri for h in principal.items.search("tea", 9)]
        for name in ("s", "t"):
            session = principal.session(name)
            for actor, request in (("planner", "q1"), (None, "q2"), (None, None)):
                found = principal.recall(
                    "tea lanterns", session=session, request_id=request, actor=actor
                )
                assert spread.uri not in [e.uri for e in found.entries]
            assert spread.uri not in session.ledger()
            assert spread.uri not in session.ledger("planner")
            assert principal.store.fsck(session) == ()
    assert [m.text for m in handle.messages()] == ["Where is it?"] * 2 + ["Again."]
    assert handle.messages()[0].parts[1] == {"type": "context", "forgotten": True}
    again.store.close()


def test_what_is_not_forgotten_stays(me, spread):
    before = me.session("s").ledger()
    me.forget(spread.uri)
    after = me.session("s").ledger()
    assert set(before) - set(after) == {spread.uri} and "memories/lamp" in after
    assert me.session("s").clock == 3 and me.items.get("memories/lamp")
    key = me.session("s").append([{"role": "user", "content": "x"}], key="k")
    assert key.first == 3


def test_a_memory_that_was_moved_is_forgotten_where_it_was_served(me, spread):
    me.items.move(spread.uri, "memories/cellar")
    me.forget("memories/cellar")
    me.store.close()
    assert holders(me.store.root) == []


CHANGES = {
    "changed": lambda items: items.put("memories/tea", "no words of before"),
    "changed and moved": lambda items: (
        items.put("memories/tea", "no words of before"),
        items.move("memories/tea", "memories/cellar"),
    ),
    "moved twice": lambda items: (
        items.move("memories/tea", "facts/shed"),
        items.put("facts/shed", "no words of before"),
        items.move("facts/shed", "memories/cellar"),
    ),
    "moved and deleted": lambda items: (
        items.move("memories/tea", "memories/cellar"),
        items.delete("memories/cellar"),
    ),
    "deleted with its folder": lambda items: (
        items.move("memories/tea", "memories/cellar"),
        items.delete("memories"),
    ),
    "replaced": lambda items: (
        items.move("memories/tea", "memories/cellar"),
        items.put("memories/tea", "another item's words"),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("under", ["itself", "memories"])
def test_what_an_item_was_before_is_forgotten_with_it(me, spread, change, under):
    CHANGES[change](me.items)
    uri = "memories/tea" if change == "changed" else "memories/cellar"
    me.forget(uri if under == "itself" else under)
    me.store.close()
    assert holders(me.store.root) == []
    served = {*me.session("s").ledger(), *me.session("s").ledger("planner")}
    is_anothers = (change, under) == ("replaced", "itself")
    assert ("memories/tea" in served) == is_anothers
    me.store.close()


def test_an_upgraded_book_forgets_by_the_words_it_has(me, spread):
    with me.store.book("lab", "ann").change() as cursor:
        cursor.execute("DROP TABLE trace")
        cursor.execute("PRAGMA user_version=1")
    me.store.close()
    me.items.move(spread.uri, "memories/cellar")
    me.items.put("memories/cellar", "no words of before")
    me.forget("memories/cellar")
    me.store.close()
    assert holders(me.store.root) == []


def test_nothing_is_kept_of_an_item_that_is_forgotten(me, spread):
    for change in CHANGES.values():
        me.items.put("memories/tea", WORDS)
        change(me.items)
        me.forget("")
    with me.store.book("lab", "ann").read() as cursor:
        assert cursor.execute("SELECT count(*) FROM trace").fetchone() == (0,)
    me.store.close()


@pytest.mark.parametrize("is_alive", [True, False])
def test_anothers_equal_words_stay(me, is_alive):
    for name in ("alice", "bob"):
        me.remember(WORDS, f"peers/{name}/memories/tea", actor=name)
    session = me.session("s")
    found = me.recall("tea", session=session, actor="alice", request_id="q")
    parts = [{"type": "context", "uri": e.uri, "text": e.text} for e in found.entries]
    session.append([{"role": "user", "content": parts}], carries=[found], actor="alice")
    if not is_alive:
        me.items.delete("peers/alice/memories/tea", actor="alice")
    me.forget("peers/bob/memories/tea", actor="bob")
    assert session.messages()[0].text == WORDS
    assert list(session.ledger("alice")) == ["peers/alice/memories/tea"]
    again = me.recall("tea", session=session, actor="alice", request_id="q")
    assert [e.text for e in again.entries] == [WORDS] * is_alive
    me.forget("peers/alice/memories/tea", actor="alice")
    me.store.close()
    assert holders(me.store.root) == []


def test_words_that_another_item_says_too_stay_where_it_says_them(me, spread):
    me.remember(WORDS, "facts/tea")
    context = {"type": "context", "uri": "facts/tea", "text": WORDS}
    me.session("s").append([{"role": "user", "content": [context]}])
    me.items.move("facts/tea", "facts/shed")  # what it said there is its own still
    me.forget("memories/tea")
    assert [m.text for m in me.session("s").messages()][-1] == WORDS
    me.forget("facts")
    me.store.close()
    assert holders(me.store.root) == []


@pytest.mark.parametrize("is_taken", [True, False])
def test_a_changed_memory_that_damage_kept_is_forgotten_when_it_is_mended(
    me, spread, is_taken
):
    CHANGES["moved twice"](me.items)
    path = me.session("s").place.file(f"history/archive_001/{LOG}")
    before = damage(path)
    with pytest.raises(CorruptPage):
        me.forget("memories/cellar")
    path.write_bytes(before)
    if is_taken:
        me.items.put("memories/tea", "another item's words")  # where it stood before
    assert me.forget("memories/cellar") == ()
    me.store.close()
    assert holders(me.store.root) == []
    assert ("memories/tea" in me.session("s").ledger()) == is_taken
    me.store.close()


def test_an_item_that_was_moved_is_not_taken_out_of_messages_by_a_retry(me, spread):
    session = me.session("s")
    me.items.move(spread.uri, "memories/cellar")
    found = me.recall("tea lanterns", session=session, request_id="q1", actor="planner")
    assert found.status == "replayed"
    assert spread.uri not in [entry.uri for entry in found.entries]
    assert all(m.parts[1]["text"] == WORDS for m in session.messages())


@pytest.mark.parametrize("mark", ["return", "append"])
def test_a_memory_forgotten_while_a_recall_runs_is_in_no_answer(me, mark):
    me.remember(WORDS, uri="memories/tea")
    me.remember("Ann likes lanterns", uri="memories/lamp")
    me.session("s").create()

    class Late(Retriever):
        def search(self, *args):
            hits = super().search(*args)
            me.forget("memories/tea")
            return hits

    me.store.retriever = Late()
    found = me.recall(
        "tea lanterns", session=me.session("s"), request_id="r", mark=mark
    )
    assert [e.uri for e in found.entries] == ["memories/lamp"]
    assert list(found.records) == ["memories/lamp"] and WORDS not in found.rendered
    assert "memories/tea" not in me.session("s").ledger()
    me.store.close()
    assert holders(me.store.root) == []


def test_a_folder_is_forgotten_with_all_below_it(me, spread):
    assert set(me.forget("memories")) == {"memories/tea", "memories/lamp"}
    assert me.session("s").ledger() == {}
    assert Memory("memories").is_at("memories/tea")
    assert not Memory("memories").is_at("memories2")


def test_a_forgetting_that_was_cut_off_is_completed_by_the_next(
    me, spread, monkeypatch
):
    whole = forget.in_session

    def dies(place, *more):
        if place.identity.session == "t":
            raise KeyboardInterrupt
        return whole(place, *more)

    with monkeypatch.context() as patch:
        patch.setattr(forget, "in_session", dies)
        with pytest.raises(KeyboardInterrupt):
            me.forget(spread.uri)
    assert any("/t/" in each for each in holders(me.store.root))
    assert me.forget(spread.uri) == ()
    me.store.close()
    assert holders(me.store.root) == []


def damage(path, line: int = 1) -> bytes:
    """Change a byte of a log's line; return what it was."""
    before = path.read_bytes()
    lines = before.split(b"\n")
    lines[line] = lines[line][:-9] + b"x" + lines[line][-8:]
    path.write_bytes(b"\n".join(lines))
    return before


@pytest.mark.parametrize(
    ("name", "line"), [(LOG, 0), (f"history/archive_001/{LOG}", 1)]
)
def test_a_session_that_cannot_be_cleaned_is_loud_when_all_others_are_clean(
    me, spread, name, line
):
    told = []
    me.store.on_forget.append(lambda *each: told.append(each))
    path = me.session("s").place.file(name)
    before = damage(path, line)
    with pytest.raises(CorruptPage, match="from a copy"):
        me.forget(spread.uri)
    assert told == [(me, spread.uri)]  # pages are cleared all the same
    me.store.close()
    left = holders(me.store.root)
    assert left and all("/s/" in each for each in left)
    path.write_bytes(before)
    assert me.forget(spread.uri) == ()  # and again, when it is mended
    me.store.close()
    assert holders(me.store.root) == []


def test_a_moved_memory_that_damage_kept_is_forgotten_when_it_is_mended(me, spread):
    me.items.move(spread.uri, "facts/cellar")  # its servings say where it was
    path = me.session("s").place.file(f"history/archive_001/{LOG}")
    before = damage(path)
    with pytest.raises(CorruptPage):
        me.forget("facts/cellar")
    notes = me.session("s").place.parent / ".forgetting"
    (note,) = notes.iterdir()
    assert b"lantern" not in note.read_bytes()  # digests, and no words
    path.write_bytes(before)
    me.store.close()
    again = SessionStore.open(me.store.root).principal("lab", "ann")
    assert again.forget("facts") == ()  # a folder is all below it
    again.store.close()
    assert holders(me.store.root) == [] and list(notes.iterdir()) == []


@pytest.mark.parametrize(
    "note", [b"", b"{", b"[]", b'{"version":1,"account":"lab","user":"bob"}', b"\xff"]
)
def test_a_note_that_says_nothing_stops_no_forgetting(me, spread, note):
    notes = me.session("s").place.parent / ".forgetting"
    notes.mkdir()
    (notes / "x.json").write_bytes(note)
    assert me.forget(spread.uri) == (spread.uri,)
    me.store.close()
    assert holders(me.store.root) == []


def test_all_of_a_users_memories_are_forgotten_at_once(me, spread):
    me.items.move(spread.uri, "facts/cellar")
    assert set(me.forget("")) == {"facts/cellar", "memories/lamp"}
    me.store.close()
    assert holders(me.store.root) == []
    assert me.session("s").ledger() == {} == me.session("s").ledger("planner")


def test_all_that_could_not_be_cleaned_is_told_at_once(me, spread):
    def fails(*_):
        raise OSError(5, "the disk of pages")

    me.store.on_forget.append(fails)
    me.session("s").place.file(LOG).unlink()  # what is left has a history
    damage(me.session("t").place.file(LOG))
    with pytest.raises(CorruptPage, match="'t'") as raised:
        me.forget(spread.uri)
    notes = "; ".join(raised.value.__notes__)
    assert "the folder 's'" in notes and "the disk of pages" in notes


def test_a_place_that_is_not_the_actors_is_refused_before_anything_is_done(me, spread):
    told = []
    me.store.on_forget.append(lambda *each: told.append(each))
    with pytest.raises(Denied):
        me.forget("peers/wang/memories/tea", actor="zhang")
    assert told == []


def test_a_damaged_chain_that_may_hold_it_goes_and_others_stay(me, spread):
    session = me.session("s")
    me.store.on_forget.append(lambda *_: None)  # who cuts the others
    session.chains.put("planner", b"pages", 0)
    session.chains.put(None, WORDS.encode(), 0)
    path = session.place.file("chains") / "user.chain"
    path.write_bytes(path.read_bytes()[:-1])
    me.forget(spread.uri)
    me.store.close()
    assert holders(me.store.root) == [] and session.chains.actors() == ("planner",)


@pytest.mark.parametrize("end", [b"", WORDS.encode()], ids=["sound", "torn"])
def test_what_a_ledgers_later_lines_took_back_goes_with_what_they_say(
    me, spread, monkeypatch, end
):
    monkeypatch.setattr(ledger, "MAX_REQUESTS", 2)  # the answer that told it goes
    session, never = me.session("u"), resident(lambda *_: ())
    for name, query in (("a", "likes"), ("b", "hides"), ("c", "likes"), ("d", "likes")):
        mark = "append" if query == "hides" else "return"
        how = {"request_id": name, "mark": mark, "cooldown": never}
        assert me.recall(query, session=session, **how).entries
    assert spread.uri not in session.ledger()
    path = session.place.file(LEDGER)
    path.write_bytes(path.read_bytes() + end)
    assert WORDS.encode() in path.read_bytes()
    me.forget(spread.uri)
    me.store.close()
    assert holders(me.store.root) == []


def test_a_folder_that_is_being_deleted_is_left_to_who_deletes_it(me, spread):
    session, beside = me.session("s"), SessionStore.open(me.store.root, wait_s=0.01)
    raised = []

    class Forgetting(type(me.store.io)):
        def perform(self, step, action):
            if step.verb == "remove_tree" and list(step.path.glob("../.gone-s/*")):
                try:
                    beside.principal("lab", "ann").forget("memories/tea")
                except Busy as busy:
                    raised.append(str(busy))
                assert step.path.exists()
            return action()

    deleting = SessionStore.open(me.store.root, io=Forgetting())
    deleting.principal("lab", "ann").session("s").delete()
    assert len(raised) == 1 and "'s'" in raised[0] and not session.exists
    assert beside.principal("lab", "ann").forget("memories/tea") == ()
    for store in (beside, deleting, me.store):
        store.close()
    assert holders(me.store.root) == []


def test_a_bad_ledger_that_may_hold_it_goes(me, spread):
    path = me.session("s").place.file(LEDGER)
    path.write_bytes(path.read_bytes().split(b"\n")[0][:-5])
    assert b"behind the lantern" in path.read_bytes()
    me.forget(spread.uri)
    me.store.close()
    assert holders(me.store.root) == [] and not path.exists()
    found = me.recall("lanterns", session=me.session("s"), cooldown=messages(3))
    assert found.status == "new"
