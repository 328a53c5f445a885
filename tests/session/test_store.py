"""The store: one root, its secret, its principals, and what it lists."""

import dataclasses
import json
import subprocess
import sys

import pytest

from kvmem.errors import ConfigError, FormatMismatch
from kvmem.session import Recall, SessionStore


def say(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def test_a_salt_is_the_stores_the_users_and_the_actors(tmp_path):
    store = SessionStore.open(tmp_path / "a")
    other = SessionStore.open(tmp_path / "b")
    salts = [
        each.principal(account, user).salt(actor)
        for each in (store, other)
        for account, user in (("lab", "ann"), ("lab", "bob"), ("la", "bann"))
        for actor in (None, "planner", "critic")
    ]
    assert len(set(salts)) == 18 and {len(salt) for salt in salts} == {32}
    again = SessionStore.open(tmp_path / "a")
    assert again.principal("lab", "ann").salt() == salts[0]
    assert store.secret.hex() not in repr(store.principal("lab", "ann"))


@pytest.mark.parametrize("damage", ["{", '{"format":"x","version":1}', "[]"])
def test_a_root_of_another_kind_or_version_is_refused(tmp_path, damage):
    SessionStore.open(tmp_path)
    facts = tmp_path / "store.json"
    newer = json.loads(facts.read_text()) | {"version": 2}
    for text in (damage, json.dumps(newer)):
        facts.write_text(text)
        with pytest.raises(FormatMismatch, match="version 1"):
            SessionStore.open(tmp_path)


def test_one_flipped_bit_of_a_roots_facts_makes_no_other_secret(tmp_path):
    SessionStore.open(tmp_path)
    facts = tmp_path / "store.json"
    whole = facts.read_bytes()
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        facts.write_bytes(damaged)
        with pytest.raises(FormatMismatch):
            SessionStore.open(tmp_path)


def test_facts_of_a_root_that_were_written_without_a_crc_are_read(tmp_path):
    secret = SessionStore.open(tmp_path).secret
    facts = tmp_path / "store.json"
    fields = json.loads(facts.read_text())
    del fields["crc"]
    facts.write_text(json.dumps(fields))
    assert SessionStore.open(tmp_path).secret == secret


@pytest.mark.parametrize("name", ["file", "file/root"])
def test_a_root_that_is_a_file_is_refused_in_words(tmp_path, name):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="Name a folder"):
        SessionStore.open(tmp_path / name)


def test_settings_that_are_none_are_refused(tmp_path):
    for wrong in ({"rules": "mem0"}, {"durability": "half"}):
        with pytest.raises(ConfigError):
            SessionStore.open(tmp_path / "r", **wrong)
    assert not (tmp_path / "r").exists()


def test_a_store_is_closed_behind_its_block_and_may_be_used_again(tmp_path):
    with SessionStore.open(tmp_path) as store:
        item = store.principal("lab", "ann").remember("tea")
    with store:
        assert store.principal("lab", "ann").items.get(item.uri).text == "tea"


def test_a_principal_is_who_it_was_made_for(tmp_path):
    me = SessionStore.open(tmp_path).principal(" lab ", "ann")
    assert me.owner == ("lab", "ann")
    for field in ("account", "user", "store", "require_actor"):
        with pytest.raises(AttributeError):
            setattr(me, field, "bob")
    assert issubclass(dataclasses.FrozenInstanceError, AttributeError)


def test_every_file_says_its_version_and_whose_it_is(tmp_path):
    store = SessionStore.open(tmp_path)
    session = store.principal("lab", "ann").session("S1")
    session.append(say("x"))
    session.commit()
    session.append(say("y"))
    session.chains.put(None, b"pages", 0)
    store.principal("lab", "ann").session("gone").delete()
    record = {"M": {"turn": 1}}
    session.append(say("z"), carries=[Recall("r", (), "off", records=record)])
    session.commit()
    seen = set()
    for path in tmp_path.rglob("*"):
        if path.is_dir() or ".lock" in str(path.relative_to(tmp_path)):
            continue
        head = json.JSONDecoder().raw_decode(path.read_text())[0]
        version = 2 if head["format"] == "kvmem.session.ledger" else 1
        assert head["version"] == version, path
        assert head["format"].startswith("kvmem.session."), path
        if path.name != "store.json":
            assert (head["account"], head["user"]) == ("lab", "ann")
            assert head["session"] in ("S1", "gone")
        seen.add(head["format"].split(".")[2])
    assert seen == {"store", "log", "meta", "ledger", "chain", "generation", "archive"}


def test_sessions_are_listed_by_their_own_ids(tmp_path):
    store = SessionStore.open(tmp_path)
    ann, bob = store.principal("lab", "ann"), store.principal("lab", "bob")
    for name in ("S", "s", "планы", "a.b"):
        ann.session(name).append(say(name))
    bob.session("his").create()
    ann.session("gone").create()
    ann.session("gone").delete()
    (ann.session("s").place.parent / "stray").mkdir()
    assert ann.sessions() == ("S", "a.b", "s", "планы")
    assert bob.sessions() == ("his",)
    assert store.principal("lab", "eve").sessions() == ()


def test_a_folder_with_a_ledger_only_is_made_a_session_and_keeps_it(tmp_path):
    me = SessionStore.open(tmp_path).principal("lab", "ann")
    session = me.session("s")
    session.place.folder.mkdir(parents=True)
    (session.place.folder / "notes.txt").write_text("mine")
    assert session.create() and (session.place.folder / "notes.txt").exists()
    empty = me.session("e")
    empty.place.folder.mkdir()
    assert empty.create() and me.store.fsck(empty) == me.store.fsck(session) == ()


def test_processes_that_open_one_new_root_agree_on_its_secret(tmp_path):
    code = (
        "import sys; from kvmem.session import SessionStore;"
        "print(SessionStore.open(sys.argv[1]).secret.hex())"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "new" / "root")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(4)]
    printed = {process.communicate(timeout=60)[0] for process in running}
    assert len(printed) == 1 and len(printed.pop()) == 65


def test_the_room_loads_no_jax():
    code = "import sys, kvmem.session; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
