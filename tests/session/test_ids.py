"""Ids: what is refused, and that no two names ever meet in one file."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmem.errors import FormatMismatch, InvalidId
from kvmem.session import SessionStore, ids

A14 = next(
    row
    for row in map(
        json.loads, Path(__file__).with_name("vectors.jsonl").read_text().splitlines()
    )
    if row["id"] == "A14"
)
NEAR = ["a/b", "a_b", "a:b", "A_B", "a.b", "A.B", ".", "..", "", "con", "CON", "con.x"]
NEAR += ["S1", "s1", "=531", "=53", "x" * 300, "x" * 301, "X" * 300, "é", "e\u0301"]
NEAR += [".a", "a.", "a\0", "a\n", "nul", "nul.a", "ſ", "K", "k", "ß", "ss", "\ud800"]


def folded(path: str) -> str:
    return path.casefold()


@pytest.mark.case("SES-31")
@given(st.lists(st.text(max_size=40) | st.sampled_from(NEAR), min_size=2, unique=True))
def test_no_two_names_have_one_path_on_any_disk(names):
    paths = [ids.to_path(name) for name in names]
    assert len({folded(path) for path in paths}) == len(names)
    for path in paths:
        assert path not in ("", ".", "..") and "/" not in path and "\0" not in path
        assert path.isascii() and not path.startswith(".") and len(path) <= 200


def test_names_that_look_alike_have_paths_of_their_own():
    paths = [folded(ids.to_path(name)) for name in NEAR]
    assert len(set(paths)) == len(set(NEAR))


def test_a_path_that_folds_names_together_would_be_seen():
    lossy = {name.replace("/", "_").replace(":", "_").lower() for name in NEAR}
    assert len(lossy) < len(set(NEAR))


def given_id(name: str) -> str:
    """Return what a vector's shorthand stands for."""
    return {"x*300": "x" * 300, "é(NFD)": "e\u0301"}.get(name, name)


@pytest.mark.parametrize("name", A14["session_ids_refused"])
def test_a_session_id_that_is_a_path_or_no_text_is_refused(name, ann):
    with pytest.raises(InvalidId):
        ann.session(given_id(name))


@pytest.mark.parametrize("pair", A14["distinct_must_not_collide"])
def test_ids_that_are_nearly_equal_are_two_sessions(pair, ann):
    for name in pair:
        ann.session(name).append([{"role": "user", "content": f"in {name}"}])
    for name in pair:
        assert [m.text for m in ann.session(name).messages()] == [f"in {name}"]
    assert set(pair) <= set(ann.sessions())


def test_a_session_id_may_be_any_word_of_any_script(ann):
    for name in ("планы", "会議 3", "été", "a" * 128, "v1.2+x@y, z!"):
        assert ann.session(name).create() and ann.session(name).exists


@pytest.mark.parametrize(
    "name", ["a/b", "a b", "é", "..", "a@b@c", "__self", "a" * 129]
)
def test_a_user_or_account_that_is_no_name_is_refused(name, open_store):
    store = open_store()
    with pytest.raises(InvalidId):
        store.principal("lab", name)
    with pytest.raises(InvalidId):
        store.principal(name, "ann")
    with pytest.raises(InvalidId, match="underscore"):
        store.principal("_lab", "ann")
    with pytest.raises(TypeError):
        store.principal("lab", 3)
    with pytest.raises(ValueError, match="blank"):
        store.principal("lab", "  ")


def test_a_key_is_any_text_of_some_length():
    assert ids.check_key("ключ\n1") == "ключ\n1"
    with pytest.raises(InvalidId):
        ids.check_key("")
    with pytest.raises(InvalidId):
        ids.check_key("k" * 257)
    with pytest.raises(TypeError):
        ids.check_key(b"k")


@pytest.mark.case("SES-05")
@pytest.mark.parametrize(
    "name", ["../x", "/etc/x", "a\\..\\b", "", "a" * 300, "a\0b", "..", "%2e%2e/x"]
)
def test_no_id_reaches_outside_the_root(name, tmp_path):
    store = SessionStore.open(tmp_path / "in" / "root")
    ann = store.principal("lab", "ann")
    for use in (
        lambda: ann.session(name).create(),
        lambda: store.principal("lab", name).session("s").create(),
        lambda: store.principal(name, "ann").session("s").create(),
        lambda: ann.session("s").chains.put(name or " ", b"x", 0),
    ):
        with pytest.raises((InvalidId, ValueError)):
            use()
    assert os.listdir(tmp_path) == ["in"] and os.listdir(tmp_path / "in") == ["root"]


@pytest.mark.case("SES-04")
def test_a_folder_under_anothers_name_is_refused(ann, open_store):
    ann.session("a_b").append([{"role": "user", "content": "mine"}])
    ann.session("a_b").place.folder.rename(ann.session("A_B").place.folder)
    other = open_store().principal("lab", "ann").session("A_B")
    with pytest.raises(FormatMismatch, match="'a_b', not 'A_B'"):
        other.messages()
    with pytest.raises(FormatMismatch):
        other.append([{"role": "user", "content": "more"}])
    bob = open_store().principal("lab", "bob").session("A_B")
    bob.place.parent.mkdir(parents=True)
    other.place.folder.rename(bob.place.folder)
    with pytest.raises(FormatMismatch):
        bob.messages()
