"""fsck: a sound session has no violation, and each law has a break that it sees."""

import json

import pytest

from kvmem.session import Hit, SessionStore, chains, fsck, ledger_file, lines
from kvmem.session.fsck import Violation
from kvmem.session.place import HISTORY, LEDGER, LOG, META


def say(text: str, **more) -> list[dict]:
    return [{"role": "user", "content": text} | more]


class Told:
    def search(self, principal, query, limit, actor, peer_scope):
        return [Hit("M", "a memory", 1.0)]


@pytest.fixture
def session(tmp_path):
    store = SessionStore.open(tmp_path, retriever=Told(), durability="process")
    ann = store.principal("lab", "ann")
    session = ann.session("s")
    session.append(say("a"), key="k0")
    found = ann.recall("q", session=session, mark="append", actor="planner")
    session.append(say("b"), carries=[found])
    session.commit()
    ann.recall("q", session=session, request_id="r")
    session.append(say("c", sources=[session.messages()[0].id]))
    session.chains.put("planner", b"pages", 0)
    return session


def laws(session) -> set[str]:
    return {each.law for each in session.principal.store.fsck(session)}


def ledger_of(session) -> dict:
    data, whose = session.place.file(LEDGER).read_bytes(), session.place.identity
    return json.loads(ledger_file.dump(ledger_file.parse(data, whose).ledger, whose))


def rewrite(session, change) -> None:
    """Change the last line of the log and seal it anew."""
    path = session.place.file(LOG)
    *before, last, _ = path.read_bytes().split(b"\n")
    fields = lines.unseal(last)
    change(fields)
    path.write_bytes(b"\n".join([*before, lines.seal(fields)]))


def test_a_sound_session_has_no_violation(session):
    assert session.principal.store.fsck(session) == ()
    assert session.principal.store.fsck(session.principal.session("none")) == ()
    session.delete()
    assert session.principal.store.fsck(session) == ()


def test_fsck_changes_nothing(session):
    with open(session.place.file(LOG), "ab") as log:
        log.write(b'{"seq": 3, "k')

    def files():
        return {
            path: path.read_bytes()
            for path in session.place.root.rglob("*")
            if path.is_file()
        }

    before = files()
    assert laws(session) == set(), "a torn end is mended by the next writer"
    assert files() == before


def ahead(session):
    fields = ledger_of(session)
    fields["entries"]["M"]["turn"] = 99
    session.place.file(LEDGER).write_text(json.dumps(fields))


def bad_actor(session):
    fields = ledger_of(session)
    fields["actors"]["a/b"] = {"M": {"turn": 0}}
    session.place.file(LEDGER).write_text(json.dumps(fields))


def bad_uri(session):
    fields = ledger_of(session)
    fields["entries"]["a\nb"] = {"turn": 0}
    session.place.file(LEDGER).write_text(json.dumps(fields))


def carried_ahead(session):
    carries = [{"id": "r9", "actor": None, "records": {"N": {"turn": 50}}}]
    rewrite(session, lambda fields: fields["message"].update(carries=carries))


def pending_but_served(session):
    fields = ledger_of(session)
    fields["requests"]["r"]["pending"] = True
    session.place.file(LEDGER).write_text(json.dumps(fields))


def twice(session):
    first = session.messages()[0].id
    rewrite(session, lambda fields: fields["message"].update(id=first))


def from_later(session):
    def change(fields):
        fields["message"]["sources"] = [fields["message"]["id"]]

    rewrite(session, change)


def no_archive(session):
    (session.place.file(HISTORY) / "archive_000").rename(session.place.root / "x")


def doubled(session):
    folder = session.place.file(HISTORY)
    (folder / "archive_001").mkdir()
    for name in (LOG, META):
        data = (folder / "archive_000" / name).read_bytes()
        (folder / "archive_001" / name).write_bytes(data)


def flip(session):
    path = session.place.file(LOG)
    session.append(say("d"))
    path.write_bytes(path.read_bytes().replace(b'"c"', b'"x"'))


def lost_end(session):
    path = session.place.file(LOG)
    path.write_bytes(b"\n".join(path.read_bytes().split(b"\n")[:-2]) + b"\n")


BREAKS = [
    ("I1", lambda session: session.place.file(META).unlink()),
    ("I1", lambda session: session.place.file(LOG).unlink()),
    ("I2", flip),
    ("I2", twice),
    ("I2", lost_end),
    ("I3", ahead),
    ("I4", carried_ahead),
    ("I4", pending_but_served),
    ("I5", bad_actor),
    ("I5", bad_uri),
    ("I5", lambda session: session.place.file(LEDGER).write_text("{")),
    ("I6", from_later),
    ("I7", no_archive),
    ("I7", doubled),
]


@pytest.mark.parametrize(("law", "break_it"), BREAKS)
def test_each_law_has_a_break_that_is_seen(session, law, break_it):
    assert laws(session) == set()
    break_it(session)
    assert law in laws(session)


@pytest.mark.parametrize("law", ["I8", "I9", "I10"])
def test_the_laws_of_chains_are_asked_of_who_writes_them(session, law):
    def judge(checked: fsck.Checked):
        assert checked.session == "s" and checked.clock == 3
        if checked.manifests != {"planner": b"pages"}:
            yield Violation(law, "other pages")

    session.principal.store.fsck_hooks.append(judge)
    assert laws(session) == set()
    session.chains.put("planner", b"other", 1)
    assert laws(session) == {law}
    assert chains.manifests(session.place) == {"planner": b"other"}
