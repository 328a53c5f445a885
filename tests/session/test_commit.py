"""Commit: messages become history once, and an extractor reads what was said once."""

import json
import shutil

import pytest

from kvmem.errors import ConfigError, CorruptPage, Deleted
from kvmem.session import SessionStore, append, archive, commit, messages
from kvmem.session.place import HISTORY, LEDGER, LOG, META


def say(*texts: str, role: str = "user") -> list[dict]:
    return [{"role": role, "content": text} for text in texts]


def texts(found) -> list[str]:
    return [message.text for message in found]


@pytest.fixture
def session(ann):
    session = ann.session("s")
    session.append(say("a", "b"), key="k0")
    session.append(say("c"), key="k1")
    return session


def test_a_commit_moves_messages_and_changes_nothing_that_is_read(session):
    before = session.messages()
    done = session.commit()
    assert done == ("archived", None, 0, 3, 0, 0)
    assert session.messages() == before and session.live() == ()
    assert session.clock == 3 and session.meta()["commit_count"] == 1
    assert session.commit() == ("skipped", "no_messages", 0, 0, 0, 0)
    session.append(say("d"))
    assert texts(session.messages(since=2)) == ["c", "d"]
    assert session.commit()[2:4] == (3, 4)
    assert texts(session.messages()) == ["a", "b", "c", "d"]
    assert session.principal.store.fsck(session) == ()


def test_a_commit_of_a_session_that_was_never_made_makes_none(ann):
    assert ann.session("new").commit().status == "skipped"
    assert not ann.folder.exists()


@pytest.mark.parametrize(
    ("keep", "live"), [(0, 0), (1, 3), (2, 3), (3, 3), (4, 5), (9, 5)]
)
def test_the_newest_messages_stay_and_a_batch_is_never_split(ann, keep, live):
    session = ann.session("s")
    session.append(say("a", "b"), key="k0")
    session.append(say("c", "d", "e"), key="k1")
    session.commit(keep=keep)
    assert len(session.live()) == live and texts(session.messages()) == list("abcde")
    assert session.append(say("c", "d", "e"), key="k1").is_repeat


def test_a_commit_keeps_a_count(session):
    for keep in (-1, 1.5, None, True):
        with pytest.raises(ConfigError):
            session.commit(keep=keep)


def test_an_archive_that_was_not_cut_from_the_log_is_finished_by_the_next_writer(
    session, monkeypatch
):
    class Killed(BaseException):
        pass

    def killed(*args):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(archive, "cut", killed)
        with pytest.raises(Killed):
            session.commit()
    assert len(session.live()) == 3 and len(archive.listed(session.place)) == 1
    assert texts(session.messages()) == ["a", "b", "c"], "none twice"
    assert session.principal.store.fsck(session) == ()
    assert session.append(say("c"), key="k1").is_repeat
    assert session.live() == () and texts(session.messages()) == ["a", "b", "c"]


def test_an_archive_that_is_not_what_the_log_begins_with_stops_every_writer(
    session, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(archive, "cut", lambda place, live, count: live)
        session.commit()
    log = session.place.file(LOG)
    head = log.read_bytes().split(b"\n")[0]
    log.write_bytes(head + b"\n")
    for use in (lambda: session.append(say("d")), session.commit):
        with pytest.raises(CorruptPage, match="archive_000"):
            use()
    assert session.principal.store.fsck(session)[0].law == "I7"


def test_a_log_that_is_gone_behind_a_history_is_damage_and_no_new_session(session):
    session.commit()
    session.place.file(LOG).unlink()
    for use in (session.messages, lambda: session.append(say("x")), session.create):
        with pytest.raises(CorruptPage, match="its log was lost"):
            use()


# Extraction.


class Notes:
    """An extractor that echoes everything, and notes what it was given."""

    def __init__(self):
        self.given = []

    def __call__(self, said):
        self.given.append(texts(said))
        return [message.text for message in said]


def test_an_extractor_is_given_every_archive_once(session):
    ann, notes = session.principal, Notes()
    session.commit()
    session.append(say("d"))
    done = session.commit(extract=notes)
    assert notes.given == [["a", "b", "c"], ["d"]] and done.extracted == 4
    assert sorted(item.text for item in ann.items.list()) == ["a", "b", "c", "d"]
    assert session.commit(extract=notes).extracted == 0 and len(notes.given) == 2
    ann.store.close()


@pytest.mark.case("SES-08")
def test_an_extraction_that_died_before_its_mark_keeps_one_copy(session, monkeypatch):
    ann, store = session.principal, session.principal.store
    with monkeypatch.context() as patch:
        patch.setattr(archive, "mark_extracted", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            session.commit(extract=Notes())
    for _ in range(2):  # recovered twice
        again = SessionStore.open(store.root).principal("lab", "ann").session("s")
        again.commit(extract=Notes())
        again.principal.store.close()
    assert sorted(item.text for item in ann.items.list()) == ["a", "b", "c"]
    assert texts(session.messages()) == ["a", "b", "c"]
    assert len(archive.listed(session.place)) == 1
    store.close()


def test_an_extraction_that_is_done_again_may_find_other_words(session, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(archive, "mark_extracted", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            session.commit(extract=lambda said: ["first words"])
    session.commit(extract=lambda said: ["other words", "more"])
    found = sorted(item.text for item in session.principal.items.list())
    assert found == ["first words", "more"]
    session.principal.store.close()


def test_an_extractor_says_whom_a_memory_is_about(session):
    ann = session.principal
    session.commit(extract=lambda said: ["mine", ("of wang", "wang"), "  "])
    assert sorted((i.text, i.peer) for i in ann.items.list()) == [
        ("mine", None),
        ("of wang", "wang"),
    ]
    ann.store.close()


def test_an_extractor_that_fails_is_loud_and_its_archive_waits(session):
    with pytest.raises(ZeroDivisionError):
        session.commit(extract=lambda said: 1 / 0)
    assert texts(session.messages()) == ["a", "b", "c"] and session.live() == ()
    notes = Notes()
    session.commit(extract=notes)
    assert notes.given == [["a", "b", "c"]]
    session.principal.store.close()


def test_an_archive_that_cannot_be_extracted_stops_no_later_one(session):
    def fails(said):
        if "a" in texts(said):
            raise ValueError("a poisoned archive")
        return texts(said)

    session.commit()
    session.append(say("d"))
    for _ in range(2):
        with pytest.raises(ValueError, match="poisoned"):
            session.commit(extract=fails)
    assert [item.text for item in session.principal.items.list()] == ["d"]
    notes = Notes()
    assert session.commit(extract=notes).extracted == 3
    assert notes.given == [["a", "b", "c"]]
    session.principal.store.close()


def test_half_a_character_of_an_older_log_is_extracted_as_a_mark(session, monkeypatch):
    whole = append.message.parse(say("emoji \U0001f600"))
    part = {"type": "text", "text": "cut \ud83d"}
    half = [each | {"parts": [part]} for each in whole]
    with monkeypatch.context() as patch:
        patch.setattr(append.message, "parse", lambda *_: tuple(half))
        session.append(say("anything"))
    assert session.commit(extract=Notes()).extracted == 4
    found = {item.text for item in session.principal.items.list()}
    assert found == {"a", "b", "c", "cut \ufffd"}
    session.principal.store.close()


@pytest.mark.parametrize("found", ["abc", None, 5, [5], [("a", 5)], {"a": "b"}, [None]])
def test_an_extractor_that_returns_no_texts_is_told_and_nothing_is_kept(session, found):
    with pytest.raises(ConfigError, match="an extractor returns a list of texts"):
        session.commit(extract=lambda said: found)
    assert session.principal.items.list() == ()
    assert session.commit(extract=Notes()).extracted == 3
    session.principal.store.close()


def test_what_is_appended_while_the_extractor_works_stays_live(session):
    def slow(said):
        session.append(say("during"))
        return ()

    session.commit(extract=slow)
    assert texts(session.live()) == ["during"] and session.clock == 4


def test_two_extractions_of_one_session_do_not_run_at_once(session):
    inner = []

    def outer(said):
        inner.append(session.commit(extract=Notes()))
        return ()

    session.commit(extract=outer)
    assert inner == [("skipped", "no_messages", 0, 0, 0, 1)], "one is pending"


def test_an_extraction_holds_no_lock_of_another_session(session):
    other = session.principal.session("s.extract")

    def extract(said):
        other.append(say("of another session"))
        return ()

    session.commit(extract=extract)
    session.append(say("more"))
    with other.place.locked():
        assert session.commit(extract=Notes()).pending == 0
    assert other.clock == 1
    session.principal.store.close()


def test_a_session_deleted_while_the_extractor_works_stays_deleted(session):
    def deleting(said):
        session.principal.session("s").delete()
        return ()

    with pytest.raises(Deleted):
        session.commit(extract=deleting)
    assert not session.place.folder.exists()


# What came from recall.


@pytest.mark.case("SES-07")
def test_a_recalled_memory_is_not_remembered_again(open_store):
    ann = open_store().principal("lab", "ann")
    m1 = ann.remember("Ann takes green tea")
    session = ann.session("s")
    found = ann.recall("tea", session=session, mark="append")
    context = {"type": "context", "uri": m1.uri, "text": m1.text}
    session.append(
        [{"role": "user", "content": ["Which tea?", context]}], carries=[found]
    )
    session.append(say("Green, as you like it.", role="assistant"))
    session.commit(extract=Notes())
    kept = sorted(item.text for item in ann.items.list())
    assert kept == ["Ann takes green tea", "Green, as you like it.", "Which tea?"]
    ann.store.close()


@pytest.mark.case("SES-24")
def test_ten_rounds_of_recall_and_an_echoing_extractor_remember_nothing_new(
    open_store,
):
    ann = open_store().principal("lab", "ann")
    ann.remember("Ann takes green tea")
    session = ann.session("s")
    for _ in range(10):
        found = ann.recall("tea", session=session, cooldown=messages(0))
        parts = [
            {"type": "context", "uri": e.uri, "text": e.text} for e in found.entries
        ]
        session.append([{"role": "user", "content": ["Which tea?", *parts]}])
        session.commit(extract=Notes())
    kept = sorted(item.text for item in ann.items.list())
    assert kept == ["Ann takes green tea", "Which tea?"]
    ann.store.close()


def test_an_extractor_sees_no_recalled_part_and_every_word_of_the_user(session):
    memories = [
        {"type": "context", "uri": "M", "text": "tea"},
        {"type": "context", "uri": "N", "text": "the memory"},
    ]
    steak = "My steak: sear. Instead of tea I drink coffee."
    session.append(
        [
            {"role": "user", "content": memories},
            {"role": "user", "content": [steak, *memories]},
            {"role": "user", "content": ["What?", "tea", " the memory\n", *memories]},
            {"role": "user", "content": ["What?", "tea\n\nthe memory", *memories]},
            {"role": "user", "content": [{"type": "image_url", "url": "x"}, "tea"]},
        ]
    )
    notes = Notes()
    session.commit(extract=notes)
    assert notes.given[0][3:] == [steak, "What?", "What?", "tea"]
    session.principal.store.close()


def test_an_extractor_that_was_given_everything_would_be_seen(session, monkeypatch):
    def everything(found):
        return tuple(commit.message.from_line(li.seq, li.stored) for li in found)

    monkeypatch.setattr(commit, "said", everything)
    notes = Notes()
    session.append(
        [{"role": "user", "content": [{"type": "context", "uri": "M", "text": "m"}]}]
    )
    session.commit(extract=notes)
    assert "m" in notes.given[0]
    session.principal.store.close()


@pytest.mark.parametrize("damage", ["facts", "messages", "flip"])
def test_a_damaged_archive_is_loud_to_who_needs_it_and_nobody_else(session, damage):
    session.commit()
    session.append(say("d"))
    folder = session.place.file(HISTORY) / "archive_000"
    if damage == "facts":
        (folder / META).write_text("{")
    elif damage == "messages":
        (folder / LOG).unlink()
    else:
        data = (folder / LOG).read_bytes()
        (folder / LOG).write_bytes(data.replace(b'"a"', b'"x"'))
    with pytest.raises(CorruptPage):
        session.messages()
    assert texts(session.live()) == ["d"] and session.clock == 4
    assert [v.law for v in session.principal.store.fsck(session)] == ["I7"]


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_an_archive_that_is_lost_is_loud_and_nothing_goes_on_without_it(session, lost):
    for text in "de":
        session.commit()
        session.append(say(text))
    session.commit()
    session.append(say("f"))
    shutil.rmtree(session.place.file(HISTORY) / f"archive_00{lost}")
    missing = ("0 to 2", "3 to 3", "4 to 4")[lost]
    for use in (session.messages, session.commit, lambda: session.append(say("g"))):
        with pytest.raises(CorruptPage, match=f"no archive holds messages {missing}"):
            use()
    assert texts(session.live()) == ["f"] and session.clock == 6
    since = (3, 4, 5)[lost]  # nobody needs what is lost from there on
    assert texts(session.messages(since)) == list("def")[since - 3 :]
    assert [v.law for v in session.principal.store.fsck(session)] == ["I7"]


def test_one_flipped_bit_of_an_archives_facts_is_loud(session):
    session.commit()
    path = session.place.file(HISTORY) / "archive_000" / META
    whole = path.read_bytes()
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        with pytest.raises(CorruptPage):
            session.messages()


def test_facts_of_an_archive_that_were_written_without_a_crc_are_read(session):
    session.commit()
    path = session.place.file(HISTORY) / "archive_000" / META
    fields = json.loads(path.read_text())
    del fields["crc"]
    path.write_text(json.dumps(fields))
    assert session.append(say("a", "b"), key="k0").is_repeat
    assert session.commit(extract=Notes()).extracted == 3
    assert "crc" in json.loads(path.read_text()), "written anew"
    session.principal.store.close()


def test_an_archive_gets_a_name_that_none_has(session):
    for text in "de":
        session.commit()
        session.append(say(text))
    history = session.place.file(HISTORY)
    (history / "archive_000").rename(history / "archive_007")
    session.commit()
    assert [a.name for a in archive.listed(session.place)] == [
        "archive_007",
        "archive_001",
        "archive_008",
    ]
    assert texts(session.messages()) == list("abcde")


def test_the_ledger_takes_over_what_lines_say_before_they_are_archived(ann):
    session = ann.session("s")
    found = ann.recall("q", session=session, mark="append")
    assert found.entries == ()
    session.create()
    record = {"turn": 0, "detail": "full", "unit": "messages", "n": 3}
    carried = type(found)("r", (), "off", records={"M": record})
    session.append(say("x"), carries=[carried])
    assert not session.place.file(LEDGER).exists()
    session.commit()
    kept = json.loads(session.place.file(LEDGER).read_text())
    assert kept["entries"]["M"]["turn"] == 0
