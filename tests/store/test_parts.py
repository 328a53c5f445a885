"""A store of several parts: all that a text goes on from, or nothing of it."""

import itertools
import random

import numpy as np
import pytest

from kvmem import errors, store
from kvmem.geometry import LayerSpec, group_layers, hit_pages, kinds
from kvmem.store import HostTier, PartedStore, Rows, parts_of

CHUNK = 4
LAYERS = {
    "latents": [
        kinds.latent("a", 0, rank=16, rope_dim=8, scale=1.0),
        kinds.indexer("a.indexer", 0, dim=128),
    ],
    "windows": [
        LayerSpec("a", 0, kv_heads=2, head_dim=8),
        LayerSpec("b", 1, kv_heads=2, head_dim=8, window=9),
    ],
    "sinks": [
        LayerSpec("a", 0, kv_heads=2, head_dim=8),
        LayerSpec("b", 1, kv_heads=2, head_dim=8, window=6, sinks=5),
    ],
    "states": [
        LayerSpec("a", 0, kv_heads=2, head_dim=8),
        kinds.gated_delta(
            "b", 1, key_heads=2, value_heads=2, key_dim=3, value_dim=5, conv_kernel=2
        ),
    ],
}
LAYERS["all"] = [
    *LAYERS["latents"],
    LayerSpec("w", 2, kv_heads=2, head_dim=8, window=9),
    LayerSpec("s", 3, kv_heads=1, head_dim=8, window=6, sinks=5),
    kinds.gated_delta(
        "d", 4, key_heads=2, value_heads=2, key_dim=3, value_dim=5, conv_kernel=2
    ),
]


def parts_for(what):
    return parts_of(group_layers(LAYERS[what], page_size=CHUNK))


class Text:
    """A text of n chunks and what each part would keep of it, aperiodic."""

    def __init__(self, parts, num, seed=0):
        rng = np.random.default_rng(seed)
        self.parts, self.num = parts, num
        self.tokens = rng.integers(0, 49_152, (num, CHUNK), np.int32)
        self.keys = store.chain_keys("m/f", self.tokens.ravel(), CHUNK)
        self.all = {
            part.name: rng.integers(0, 256, (num, part.row_nbytes(CHUNK)), np.uint8)
            for part in parts
        }

    def rows(self, **ordinals):
        """Return the rows of these chunks of each part; of those not named, all."""
        at = {name: ordinals.get(name, range(self.num)) for name in self.all}
        return {
            name: Rows(tuple(some), self.all[name][list(some)])
            for name, some in at.items()
        }

    def kept(self, n):
        """Return what is kept at the end of a text of n chunks: what is read there."""
        return self.rows(**{p.name: p.needed(n, CHUNK) for p in self.parts})

    def is_served(self, found, first=0):
        """Say whether all that is read after a hit is there, with the very bytes."""
        for part in self.parts:
            rows = found.rows[part.name]
            needed = part.needed(found.num_hit, CHUNK)
            assert set(rows.ordinals) >= {i for i in needed if i >= first}
            assert np.array_equal(rows.rows, self.all[part.name][list(rows.ordinals)])
        return True


@pytest.fixture
def opened(tmp_path):
    """Open parts on the test's root; every store is closed at the end."""
    made = []

    def open_(parts, format_id="f", **options):
        made.append(
            PartedStore.open(tmp_path / "root", "m", format_id, parts, CHUNK, **options)
        )
        return made[-1]

    yield open_
    for each in made:
        each.close()


@pytest.fixture
def in_memory():
    """Parts in RAM: a store a part, whatever keeps it."""

    def make(parts):
        facts = store.Facts("m", "f", CHUNK, parts[0].record_nbytes)
        stores = {
            part.name: HostTier(
                1 << 24,
                record_nbytes=part.stored_nbytes(CHUNK),
                chunk_tokens=CHUNK,
                model_id="m",
                format_id=store.part_id("f", part.name),
            )
            for part in parts
        }
        return PartedStore(facts, parts, stores)

    return make


def test_parts_are_told_by_lifecycles_and_tied_groups_are_one():
    assert [part.name for part in parts_for("all")] == [
        *("base", "window6s5", "window9", "state")
    ]
    groups = group_layers(LAYERS["latents"], page_size=16)
    (base,) = parts_of(groups)
    assert base.groups == (0, 1)
    assert base.record_nbytes == sum(group.record_nbytes for group in groups)
    window = LayerSpec("w", 0, kv_heads=2, head_dim=8, window=9)
    with pytest.raises(errors.IncompatiblePlan, match="window9"):
        parts_of(group_layers([window], page_size=4))


@pytest.mark.parametrize("what", LAYERS)
def test_what_was_put_at_the_end_of_a_text_is_served_there(opened, what):
    parts = parts_for(what)
    text = Text(parts, 6)
    with opened(parts) as kept:
        done = kept.put(text.keys, text.tokens, text.kept(6))
        assert done.written == 6 and kept.stats().num_chunks == 6
        assert kept.contains(text.keys) == 6
        found = kept.get(text.keys, text.tokens)
    assert (found.num_hit, found.reason) == (6, None)
    assert text.is_served(found)
    with opened(parts, read_only=True) as again:
        assert text.is_served(again.get(text.keys, text.tokens))


@pytest.mark.case("LAY-11")
def test_the_usable_prefix_is_that_of_the_shortest_part(in_memory):
    """Six pages of windows' texts, four of which have all that goes with them."""
    parts = parts_for("windows")
    text, kept = Text(parts, 6), in_memory(parts)
    kept.put(text.keys, text.tokens, text.rows(window9=range(4)))
    found = kept.get(text.keys, text.tokens)
    assert (found.num_hit, found.reason) == (4, "window9: not_found")
    assert "the base has 6 chunks" in found.detail
    assert text.is_served(found)


@pytest.mark.case("LAY-11")
def test_attention_without_its_state_is_refused(in_memory):
    """As LMCache PR #5010 refuses a hit of which one plane is missing."""
    parts = parts_for("states")
    text, kept = Text(parts, 6), in_memory(parts)
    kept.put(text.keys, text.tokens, text.rows(state=()))
    found = kept.get(text.keys, text.tokens)
    assert (found.num_hit, found.rows, found.reason) == (0, {}, "state: not_found")
    assert kept.stats().misses == {"state: not_found": 1}
    kept.put(text.keys, text.tokens, {"state": text.rows(state=(2,))["state"]})
    found = kept.get(text.keys, text.tokens)
    assert (found.num_hit, found.rows["state"].ordinals) == (3, (2,))


def test_a_state_serves_exactly_where_it_stands(in_memory):
    """As vLLM #51094 restored it one token too far at a chunk's boundary."""
    parts = parts_for("states")
    text, kept = Text(parts, 5), in_memory(parts)
    kept.put(text.keys, text.tokens, text.rows(state=(1, 3)))
    hits = [kept.get(text.keys[:n], text.tokens[:n]).num_hit for n in range(6)]
    assert hits == [0, 0, 2, 2, 4, 4]


def test_a_state_under_another_states_key_is_no_hit(in_memory):
    parts = parts_for("states")
    text, kept = Text(parts, 4), in_memory(parts)
    wrong = parts[1].packed(Rows((1,), text.all["state"][1:2]), CHUNK)
    kept.put(text.keys, text.tokens, text.rows(state=()))
    kept.stores["state"].put(
        text.keys[2:3], text.tokens[2:3], wrong.reshape(1, CHUNK, -1)
    )
    found = kept.get(text.keys, text.tokens)
    assert (found.num_hit, found.reason) == (0, "state: tokens")


def test_sinks_are_part_of_what_a_window_reads(in_memory):
    parts = parts_for("sinks")
    assert parts[1].needed(6, CHUNK) == (0, 1, 4, 5)
    text, kept = Text(parts, 6), in_memory(parts)
    kept.put(text.keys, text.tokens, text.rows(window6s5=(0, 4, 5)))
    assert kept.get(text.keys, text.tokens).num_hit == 1
    kept.put(text.keys, text.tokens, {"window6s5": text.rows()["window6s5"]})
    assert text.is_served(kept.get(text.keys, text.tokens))


def test_chunks_that_a_caller_has_are_not_read(in_memory):
    parts = parts_for("all")
    text, kept = Text(parts, 8), in_memory(parts)
    kept.put(text.keys, text.tokens, text.kept(8))
    found = kept.get(text.keys, text.tokens, first=7)
    assert found.num_hit == 8
    assert all(set(rows.ordinals) <= {7} for rows in found.rows.values())
    assert text.is_served(found, first=7)
    short = kept.get(text.keys[:7], text.tokens[:7], first=7)
    assert (short.num_hit, short.rows) == (7, {})


def test_a_windows_rows_begin_with_their_page_where_they_can(in_memory):
    parts = parts_for("windows")
    text, kept = Text(parts, 8), in_memory(parts)
    kept.put(text.keys, text.tokens, text.rows(window9=(4, 5, 6, 7)))
    # after 32 tokens positions from 24 on are read: chunk 6, in a page of 12 or 16
    for page, ordinals in ((1, (6, 7)), (4, (6, 7)), (12, (6, 7)), (16, (4, 5, 6, 7))):
        found = kept.get(text.keys, text.tokens, page_tokens=page)
        assert found.rows["window9"].ordinals == ordinals
        assert text.is_served(found)
    kept = in_memory(parts)
    kept.put(text.keys, text.tokens, text.rows(window9=(5, 6, 7)))
    found = kept.get(text.keys, text.tokens, page_tokens=16)
    assert found.rows["window9"].ordinals == (6, 7)
    other = text.rows(window9=(4,))["window9"].rows.reshape(1, CHUNK, -1)
    kept.stores["window9"].put(text.keys[4:5], text.tokens[4:5] + 1, other)
    found = kept.get(text.keys, text.tokens, page_tokens=16)
    assert (found.num_hit, found.rows["window9"].ordinals) == (8, (6, 7))


@pytest.mark.parametrize("seed", range(3))
def test_random_texts_with_random_holes_hit_the_fixed_point(in_memory, seed):
    """Over every subset of rows that was put: the rule in one look, and the bytes."""
    rng, parts = random.Random(seed), parts_for("all")
    lives = [part.life for part in parts]
    hits = set()
    for turn in range(40):
        text, kept = Text(parts, 7, seed=100 * seed + turn), in_memory(parts)
        some = {
            part.name: [i for i in range(7) if rng.random() < 0.85] for part in parts
        }
        kept.put(text.keys, text.tokens, text.rows(**some))
        present = [np.isin(range(7), some[part.name]) for part in parts]
        found = kept.get(text.keys, text.tokens)
        assert found.num_hit == hit_pages(lives, CHUNK, present)
        assert kept.contains(text.keys) == found.num_hit
        assert (found.reason is None) == (found.num_hit == 7)
        assert not found.num_hit or text.is_served(found)
        hits.add(found.num_hit)
    assert len(hits) > 2


def test_a_writer_that_dies_before_the_base_leaves_no_hit(opened, monkeypatch):
    parts = parts_for("all")
    text, kept = Text(parts, 5), opened(parts)

    def dies(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept.stores["base"], "put", dies)
    with pytest.raises(OSError, match="No space"):
        kept.put(text.keys, text.tokens, text.kept(5))
    assert kept.stores["state"].stats().num_chunks == 1
    found = kept.get(text.keys, text.tokens)
    assert (found.num_hit, found.reason[:6]) == (0, "base: ")
    kept.close()
    with opened(parts) as again:
        rest = {"base": text.rows()["base"]}
        again.put(text.keys, text.tokens, rest)
        assert text.is_served(again.get(text.keys, text.tokens))


@pytest.mark.parametrize("name", ["base", "window9", "state"])
def test_damage_of_any_part_shortens_all_of_them(opened, tmp_path, name, a_file_a_row):
    parts = parts_for("all")
    text = Text(parts, 6)
    with opened(parts) as kept:
        kept.put(text.keys, text.tokens, text.rows())
    folder = tmp_path / "root" / "m" / f"f.{name}"
    files = [p for p in folder.rglob("*") if p.is_file() and "orbax" in p.parts]
    row = text.all[name][5].tobytes()
    (holder,) = [path for path in files if row in path.read_bytes()]
    spoiled = bytearray(holder.read_bytes())
    spoiled[spoiled.index(row) + 3] ^= 1
    holder.write_bytes(spoiled)
    with opened(parts, read_only=True) as kept:
        found = kept.get(text.keys, text.tokens)
        assert (found.num_hit, found.reason) == (5, f"{name}: checksum")
        assert text.is_served(found)
        reports = kept.verify()
    bad = [of for of, rows in reports.items() if any(r.problems for r in rows)]
    assert bad == [name]


def test_all_parts_are_under_one_writers_lock(opened, tmp_path):
    parts = parts_for("all")
    kept = opened(parts)
    for each in (lambda: opened(parts), lambda: opened(parts, format_id="g")):
        with pytest.raises(errors.StoreLocked):
            each()
    with pytest.raises(errors.StoreLocked):
        store.PageStore.open(tmp_path / "root", "m", "f", 8, CHUNK)
    stores = list(kept.stores.values())
    for each in stores[:-1]:
        each.close()
    with pytest.raises(errors.StoreLocked):
        opened(parts)
    stores[-1].close()
    assert not kept.writable
    opened(parts).close()


def test_a_root_that_cannot_be_opened_is_let_go(opened):
    parts = parts_for("states")
    text = Text(parts, 2)
    with opened(parts) as kept:
        kept.put(text.keys, text.tokens, text.kept(2))
    with pytest.raises(errors.FormatMismatch, match="record_nbytes"):
        opened(
            (
                parts[0],
                parts_for("all")[-1].__class__("state", parts[1].life, (), (9_999,)),
            )
        )
    opened(parts).close()


def test_a_reader_takes_in_what_a_writer_put_since(opened):
    parts = parts_for("states")
    text, kept = Text(parts, 3), opened(parts)
    reader = opened(parts, read_only=True)
    kept.put(text.keys, text.tokens, text.kept(3))
    assert reader.get(text.keys, text.tokens).num_hit == 0
    assert reader.refresh() == 2
    assert text.is_served(reader.get(text.keys, text.tokens))


def test_what_cannot_be_put_is_refused_before_anything_is(in_memory):
    parts = parts_for("states")
    text, kept = Text(parts, 3), in_memory(parts)
    good = text.rows()
    for bad, error in (
        ({"window7": good["base"]}, errors.InvalidId),
        ({"base": Rows((3,), good["base"].rows[:1])}, errors.InvalidId),
        ({"base": Rows((1, 0), good["base"].rows[:2])}, errors.InvalidId),
        ({"base": Rows((0,), good["base"].rows[:1, 1:])}, errors.FormatMismatch),
    ):
        with pytest.raises(error):
            kept.put(text.keys, text.tokens, good | bad)
        assert all(each.stats().num_chunks == 0 for each in kept.stores.values())


def test_every_pair_of_plans_that_differ_has_names_of_its_own():
    names = [store.part_id("v1-ab", part.name) for part in parts_for("all")]
    assert len(set(names)) == 4
    assert {store.whole_id(name) for name in names} == {"v1-ab"}
    for alone in ("v1-ab", "f.other", "base", "x.y.windows"):
        assert store.whole_id(alone) == alone
    assert all(a != b for a, b in itertools.combinations(names, 2))
