"""Settings are understood or refused, and say where they come from."""

import dataclasses
import pathlib
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmem import errors, settings
from kvmem.settings import Nbytes, Override


@dataclasses.dataclass(frozen=True)
class Room:
    page_size: int = 16
    memory: Nbytes | None = None
    share: float = 1.0
    names: tuple[str, ...] = ()
    kind: Literal["split", "unified"] = "split"
    checked: bool = False

    def __post_init__(self):
        if self.page_size < 1:
            raise errors.ConfigError("page_size is below one")


@dataclasses.dataclass(frozen=True)
class House:
    room: Room = Room()
    cellar: Room | None = None
    title: str | None = None
    widths: tuple[int, ...] = (1, 2)


@dataclasses.dataclass(frozen=True)
class Street:
    houses: tuple[Room, ...] = ()


@dataclasses.dataclass(frozen=True)
class Needy:
    name: str


@pytest.fixture
def read(tmp_path: pathlib.Path):
    def read(text="", overrides=(), env=None, kind=House):
        path = tmp_path / "x.toml"
        path.write_text(text)
        return settings.read(kind, path, overrides, env or {})

    return read


def test_a_file_sets_values_and_leaves_the_rest_at_their_defaults(read):
    loaded = read('widths = [4]\n[room]\nmemory = "2GiB"\nshare = 1\nnames = ["a"]')
    room = Room(memory=Nbytes(2 << 30), share=1.0, names=("a",))
    assert loaded.value == House(room=room, widths=(4,))
    assert type(loaded.value.room.share) is float
    hash(loaded.value)


@pytest.mark.case("CFG-01")
def test_an_unknown_key_is_refused_with_the_nearest_known_one(read):
    with pytest.raises(
        errors.ConfigError, match="room.page_sice, .* is room.page_size"
    ):
        read("[room]\npage_sice = 3")
    with pytest.raises(errors.ConfigError, match="unknown key rom, .* is room"):
        read("[rom]\npage_size = 3")
    with pytest.raises(
        errors.ConfigError, match="unknown key page_size, .*room.page_s"
    ):
        read("page_size = 3")


@pytest.mark.case("CFG-01")
@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('page_size = "16"', "room.page_size: '16' is str, not int"),
        ("page_size = true", "room.page_size: True is bool, not int"),
        ("page_size = 1.0", "room.page_size: 1.0 is float, not int"),
        ("checked = 1", "room.checked: 1 is int, not bool"),
        ('names = "abc"', "room.names: 'abc' is str, not a list"),
        ("names = [1]", r"room.names\[0\]: 1 is int, not str"),
        ('kind = "other"', "room.kind: 'other' is none of 'split', 'unified'"),
        ("memory = 1.5", "room.memory: 1.5 is float, not a number of bytes"),
        ('memory = "2 GiBs"', "room.memory: '2 GiBs' as a number of bytes"),
        ("share = false", "room.share: False is bool, not float"),
        ("page_size = 0", "room: page_size is below one"),
    ],
)
def test_a_wrong_type_is_refused_and_nothing_is_coerced(read, text, complaint):
    with pytest.raises(errors.ConfigError, match=complaint):
        read(f"[room]\n{text}")


def test_a_table_is_a_table(read):
    with pytest.raises(errors.ConfigError, match="room: 3 is int, not a table"):
        read("room = 3")


def test_every_fault_is_reported_at_once(read):
    with pytest.raises(errors.ConfigError) as caught:
        read("[room]\npage_size = 'a'\nshares = 2", ["room.kind=x", "nope=1"])
    for part in ("room.page_size", "room.shares", "room.kind", "unknown key nope"):
        assert part in str(caught.value)


def test_a_list_of_tables_becomes_a_tuple_and_is_as_strict(read):
    text = "[[houses]]\npage_size = 2\n[[houses]]\n"
    assert read(text, kind=Street).value.houses == (Room(page_size=2), Room())
    with pytest.raises(errors.ConfigError) as caught:
        read(text + "page_sice = 3\nchecked = 1", kind=Street)
    assert "key houses[1].page_sice, the nearest known key is houses[].page_size" in (
        str(caught.value)
    )
    assert "houses[1].checked: 1 is int, not bool" in str(caught.value)


def test_a_required_key_is_named(read):
    with pytest.raises(errors.ConfigError, match="name is required and not set"):
        read(kind=Needy)


@pytest.mark.case("CFG-01")
def test_later_sources_win_and_each_value_says_where_it_came_from(read):
    loaded = read(
        "[room]\npage_size = 8\nshare = 0.5\nchecked = true",
        ["room.page_size=32"],
        {
            "KVMEM_ROOM__PAGE_SIZE": "64",
            "KVMEM_ROOM__SHARE": "0.25",
            "KVMEM_CELLAR__KIND": "unified",
            "KVMEM_TITLE": "3",
            "HOME": "/somewhere",
        },
    )
    found = {s.key: (s.value, s.source.split(" ")[0]) for s in loaded.settings}
    assert found["room.page_size"] == (32, "--set")
    assert found["room.share"] == (0.25, "env")
    assert found["room.checked"] == (True, "file")
    assert found["room.kind"] == ("split", "default")
    assert found["cellar.kind"] == ("unified", "env")
    assert found["title"] == ("3", "env")
    assert loaded.value.room == Room(page_size=32, share=0.25, checked=True)
    sources = {s.key: s.source for s in loaded.settings}
    assert sources["room.share"] == "env KVMEM_ROOM__SHARE"
    assert sources["room.checked"].endswith("x.toml")


def test_the_settings_list_every_leaf_once(read):
    keys = [s.key for s in read("[cellar]\npage_size = 2").settings]
    leaves = [f.name for f in dataclasses.fields(Room)]
    wanted = [f"room.{n}" for n in leaves] + [f"cellar.{n}" for n in leaves]
    assert keys == [*wanted, "title", "widths"]


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("room.page_sice=3", "--set: unknown key room.page_sice, .* room.page_size"),
        ("room.page_size=abc", "room.page_size = abc is no TOML value"),
        ("room.page_size=1.5", "room.page_size: 1.5 is float, not int"),
        ("room=3", "--set: room is a table"),
        ("room.page_size.deep=3", "unknown key room.page_size.deep"),
        ("room.page_size", "an override is a key and a value"),
        ("=3", "an override is a key and a value"),
    ],
)
def test_an_override_is_as_strict_as_the_file(read, override, complaint):
    with pytest.raises(errors.ConfigError, match=complaint):
        read("", [override])


def test_an_unknown_environment_key_is_refused(read):
    with pytest.raises(errors.ConfigError, match="env KVMEM_ROOM__PAGE_SICE: unknown"):
        read("", env={"KVMEM_ROOM__PAGE_SICE": "3"})


def test_the_folder_of_the_machines_cache_is_no_setting(read):
    assert read("", env={"KVMEM_CACHE": "/somewhere"}).value == House()


def test_an_empty_override_unsets_what_may_be_unset(read):
    assert read('title = "a"', ["title="]).value.title is None
    with pytest.raises(errors.ConfigError, match="no TOML value"):
        read("", ["room.page_size="])


def test_an_override_names_who_gave_it(read):
    given = [Override("room.memory", "3GB", "--memory")]
    loaded = read("", given)
    assert loaded.value.room.memory == 3_000_000_000
    assert {s.key: s.source for s in loaded.settings}["room.memory"] == "--memory"


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [(b"a = [", "it is not TOML"), (b"\xff\xfe", "it is not text")],
)
def test_a_file_that_is_no_toml_is_refused(tmp_path, raw, complaint):
    path = tmp_path / "x.toml"
    path.write_bytes(raw)
    with pytest.raises(errors.ConfigError, match=complaint):
        settings.read(House, path)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(errors.ConfigError, match="No such file"):
        settings.read(House, tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("17", 17),
        ("2GiB", 2 << 30),
        ("80GB", 80 * 10**9),
        ("1.5 GiB", 3 << 29),
        ("512 mib", 512 << 20),
        ("3kB", 3000),
        ("4 KiB", 4096),
        ("2TiB", 2 << 40),
    ],
)
def test_bytes_are_read_in_units_of_1000_and_1024(text, nbytes):
    assert settings.parse_nbytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1.5", "0.3B", "2 Gib B", "1e9"])
def test_what_is_no_whole_number_of_bytes_is_refused(text):
    with pytest.raises(errors.ConfigError, match="as a number of bytes"):
        settings.parse_nbytes(text)


@given(st.integers(0, 2**63))
def test_any_number_of_bytes_is_read_exactly(nbytes):
    assert settings.parse_nbytes(str(nbytes)) == nbytes
    assert settings.parse_nbytes(f"{nbytes}KiB") == nbytes * 1024


@dataclasses.dataclass(frozen=True)
class Inner:
    tp: int = 1


@dataclasses.dataclass(frozen=True)
class Made:
    name: str = "x"
    pages: int | None = None
    memory: Nbytes | None = None
    share: float = 1.0
    flag: bool = False
    kind: Literal["a", "b"] | None = None
    sizes: tuple[int, ...] = ()
    inner: Inner = Inner()

    def __post_init__(self):
        settings.settle(self)


def test_what_python_gives_is_spelled_as_toml_would_spell_it():
    made = Made(
        name=pathlib.PurePosixPath("a/b"),
        pages=np.int64(3),
        memory="1MiB",
        share=np.float64(0.5),
        sizes=[1, np.uint8(2)],
        kind="b",
    )
    assert made == Made("a/b", 3, 1 << 20, 0.5, False, "b", (1, 2))
    kinds = [type(made.pages), type(made.share), *map(type, made.sizes)]
    assert kinds == [int, float, int, int]
    assert Made(share=1).share == 1.0 and {made: 1}[made] == 1


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"pages": 2.5}, "pages: 2.5 is float, not an integer"),
        ({"pages": 2.0}, "pages: 2.0 is float, not an integer"),
        ({"pages": True}, "pages: True is bool, not int"),
        ({"pages": "2"}, "pages: '2' is str, not int"),
        ({"memory": 1.5e6}, "memory: 1500000.0 is float, not an integer"),
        ({"memory": True}, "memory: True is bool, not a number of bytes"),
        ({"memory": "much"}, "memory: 'much' as a number of bytes"),
        ({"memory": -1}, "memory: '?-1'? as a number of bytes"),
        ({"share": "1"}, "share: '1' is str, not float"),
        ({"share": True}, "share: True is bool, not float"),
        ({"flag": 1}, "flag: 1 is int, not bool"),
        ({"name": 1}, "name: 1 is int, not str"),
        ({"name": None}, "name: None is NoneType, not str"),
        ({"kind": "c"}, "kind: 'c' is none of 'a', 'b'"),
        ({"sizes": (1.5, 8)}, "sizes: 1.5 is float, not an integer"),
        ({"sizes": 8}, "sizes: 8 is int, not a list"),
        ({"inner": {"tp": 2}}, "inner: .* is dict, not Inner"),
    ],
)
def test_what_python_gives_of_another_type_is_refused(values, fault):
    with pytest.raises(errors.ConfigError, match=fault):
        Made(**values)


def test_every_wrong_type_is_named_at_once():
    with pytest.raises(errors.ConfigError) as refused:
        Made(pages=2.5, memory=0.5, flag=1)
    assert all(name in str(refused.value) for name in ("pages", "memory", "flag"))


@dataclasses.dataclass(frozen=True)
class Museum:
    facts: settings.Table | None = None
    page_size: int = 16

    def __post_init__(self):
        settings.settle(self)


FACTS = """
page_size = 4
[facts]
layers = 2
kinds = ["a", "b"]
theta = 1e6
nested = { on = true, empty = {} }
"""


def test_a_table_of_facts_keeps_what_was_written_and_can_be_hashed(read):
    value = read(FACTS, kind=Museum).value
    again = Museum({"nested": {"empty": {}, "on": True}} | dict(value.facts))
    assert value.facts["kinds"] == ("a", "b")
    assert value.facts.plain() == {
        "layers": 2,
        "kinds": ["a", "b"],
        "theta": 1e6,
        "nested": {"on": True, "empty": {}},
    }
    assert dataclasses.replace(again, page_size=4) == value
    assert hash(again.facts) == hash(value.facts)
    assert len({again.facts, value.facts, settings.Table({"layers": 3})}) == 2


def test_every_fact_says_where_it_came_from(read):
    overrides = ["facts.layers=3", "facts.nested.name=x-7", "page_size=8"]
    loaded = read(FACTS, overrides, {"KVMEM_FACTS__THETA": "2.5"}, kind=Museum)
    told = {s.key: (s.value, s.source.split()[0]) for s in loaded.settings}
    assert told == {
        "facts.layers": (3, "--set"),
        "facts.kinds": (["a", "b"], "file"),
        "facts.theta": (2.5, "env"),
        "facts.nested.on": (True, "file"),
        "facts.nested.empty": ({}, "file"),
        "facts.nested.name": ("x-7", "--set"),
        "page_size": (8, "--set"),
    }


@pytest.mark.parametrize(
    ("text", "overrides", "complaint"),
    [
        ("facts = 3", (), "3 is int, not a table"),
        ("facts.a = 1979-05-27", (), "a fact is a number, a text"),
        ("facts.a = 3", ["facts.a.b=1"], "'a' of facts.a.b is not a table"),
        ("facts = 3", ["facts.b=1"], "'facts' is not a table in the file"),
        ("", ["facts=3"], "3 is int, not a table"),
        ("", ["fact.b=1"], "unknown key fact.b"),
    ],
)
def test_what_is_no_table_of_facts_is_refused(read, text, overrides, complaint):
    with pytest.raises(errors.ConfigError, match=complaint):
        read(text, overrides, kind=Museum)
