"""Deletion: gone for everyone, and nothing that is in flight brings it back."""

import pytest

from kvmem.errors import CorruptPage, Deleted
from kvmem.session import OsIO, SessionStore
from kvmem.session.materialise import GONE
from kvmem.session.place import LOG


def say(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


@pytest.fixture
def session(ann):
    session = ann.session("s")
    session.append(say("old"), key="k")
    return session


def uses(session):
    return [
        session.messages,
        session.live,
        session.ledger,
        session.commit,
        lambda: session.clock,
        lambda: session.append(say("new"), key="k"),
        lambda: session.chains,
    ]


def test_a_deleted_session_refuses_every_handle_and_leaves_no_file(session, open_store):
    open_store().principal("lab", "ann").session("s").delete()
    fresh = open_store().principal("lab", "ann").session("s")
    for handle in (session, fresh):
        assert not handle.exists
        for use in uses(handle):
            with pytest.raises(Deleted):
                use()
    assert not session.place.folder.exists() and session.principal.sessions() == ()
    assert b"old" not in b"".join(
        p.read_bytes() for p in session.place.root.rglob("*") if p.is_file()
    )


def test_a_session_that_was_never_made_can_be_deleted_and_stays_so(ann):
    ann.session("s").delete()
    with pytest.raises(Deleted):
        ann.session("s").append(say("late"))
    assert not ann.session("s").place.folder.exists()


def test_what_is_deleted_is_begun_anew_by_name_only(session, open_store):
    session.delete()
    session.delete()
    anew = open_store().principal("lab", "ann").session("s")
    assert anew.create() and not anew.create()
    assert anew.append(say("new"), key="k") == (0, 1, False, None)
    assert [m.text for m in anew.messages()] == ["new"]
    for use in [*uses(session), session.delete]:  # a handle of the life before
        with pytest.raises(Deleted, match="begun anew"):
            use()
    assert anew.clock == 1


@pytest.mark.parametrize("verb", ["replace", "rename_dir", "remove_tree"])
def test_a_deletion_that_was_cut_off_is_none_or_whole(session, verb, open_store):
    class Killed(BaseException):
        pass

    class Dying(OsIO):
        is_on = False

        def perform(self, step, action):
            if self.is_on and step.verb == verb:
                raise Killed
            return super().perform(step, action)

    disk = Dying()
    doomed = open_store(io=disk).principal("lab", "ann").session("s")
    disk.is_on = True
    with pytest.raises(Killed):
        doomed.delete()
    ann = open_store().principal("lab", "ann")
    if verb == "replace":
        assert ann.session("s").clock == 1
    else:
        with pytest.raises(Deleted):
            ann.session("s").append(say("late"))
    ann.session("s").delete()
    assert ann.session("s").create() and ann.session("s").clock == 0
    assert not list(ann.session("s").place.parent.glob(GONE + "*"))


def test_whoever_keeps_pages_is_told_which_chains_went(session):
    told = []
    session.principal.store.on_delete.append(lambda *each: told.append(each))
    session.chains.put("planner", b"pages", 0)
    session.chains.put(None, b"mine", 0)
    session.delete()
    assert told == [(session, {"planner": b"pages", None: b"mine"})]


def test_a_damaged_note_lets_nobody_go_on(session):
    session.delete()
    session.place.tombstone.write_text("{}")
    with pytest.raises(CorruptPage, match="deletion"):
        session.principal.session("s").append(say("x"))
    assert session.principal.recall("q", session=session).status == "unavailable"


def test_openvikings_rules_keep_no_note(tmp_path):
    store = SessionStore.open(tmp_path, rules="openviking")
    session = store.principal("lab", "ann").session("s")
    session.append(say("a"), key="k")
    session.delete()
    assert not session.exists and session.clock == 0
    assert session.append(say("a"), key="k").first == 0
    assert session.place.file(LOG).exists() and not session.place.tombstone.exists()


class DeletesMeanwhile(OsIO):
    """A disk on which the session is deleted just before a file of it is read."""

    def __init__(self):
        self.name, self.delete = None, None

    def read(self, path):
        if self.name is not None and path.match(self.name):
            self.name = None
            self.delete()
        return super().read(path)


@pytest.mark.parametrize(
    "name", ["s/messages.jsonl", "*_000/.meta.json", "*_001/*.jsonl"]
)
@pytest.mark.parametrize("is_made_anew", [False, True])
def test_what_is_deleted_while_it_is_read_is_deleted_and_not_damaged(
    tmp_path, name, is_made_anew
):
    disk = DeletesMeanwhile()
    store = SessionStore.open(tmp_path, io=disk)
    session = store.principal("lab", "ann").session("s")
    for text in "ab":
        session.append([{"role": "user", "content": text}])
        session.commit()
    beside = SessionStore.open(tmp_path).principal("lab", "ann").session("s")

    def delete():
        beside.delete()
        if is_made_anew:
            beside.create()

    disk.name, disk.delete = name, delete
    with pytest.raises(Deleted):
        session.messages()
    assert disk.name is None


@pytest.mark.parametrize("name", ["s/messages.jsonl", "s/.recall_log.json"])
def test_a_recall_says_that_its_session_was_deleted_while_it_was_read(tmp_path, name):
    disk = DeletesMeanwhile()
    me = SessionStore.open(tmp_path, io=disk).principal("lab", "ann")
    me.remember("green tea", "memories/tea")
    session = me.session("s")
    session.create()
    beside = SessionStore.open(tmp_path).principal("lab", "ann").session("s")
    disk.name, disk.delete = "s/messages.jsonl", beside.delete
    found = me.recall("tea", session=session)
    assert len(found.entries) == 1 and disk.name is None
    assert found.status == "unavailable" and "deleted" in found.reason
    me.store.close()
