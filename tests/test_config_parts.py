"""[store] for a model of several groups: what it opens, and what it refuses."""

import dataclasses

import pytest

from kvmem import canonical, config, errors, geometry, store
from kvmem.store import facts_file

TINY = ("gpt_oss", "gemma3", "deepseek_v32", "qwen3_next")


@pytest.fixture
def tiny(repo_root):
    """Return the config of a tiny hybrid, by its name."""

    def make(name, *overrides):
        path = repo_root / "configs" / "models" / f"{name}_tiny.toml"
        return config.load(path, overrides, env={})

    return make


class Model:
    """All that a store asks of a loaded model."""

    model_id = "a" * 64
    facts = {"scheme": "a test's"}


@pytest.mark.parametrize("name", TINY)
def test_several_groups_open_a_store_of_parts_that_says_what_it_holds(
    tiny, tmp_path, name
):
    made = tiny(name, f"store.root={tmp_path / 's'}")
    groups = made.groups()
    kept = made.store.open(Model(), groups)
    assert isinstance(kept, store.PartedStore) and kept.writable
    assert kept.parts == store.parts_of(groups)
    assert kept.facts.format_id == canonical.format_id(groups)
    kept.close()
    said = facts_file.read(tmp_path / "s", Model.model_id, kept.facts.format_id)
    assert said.format == canonical.format_fields(groups)
    again = tiny(name, f"store.root={tmp_path / 's'}", "store.read_only=true")
    assert not again.store.open(Model(), groups).writable


def test_a_model_of_one_group_keeps_its_root_as_it_was(tiny, tmp_path):
    """Full attention alone has no parts: the folder is the format's own."""
    made = tiny("gpt_oss", f"store.root={tmp_path / 's'}", "serve.max_length=32")
    (group,) = made.groups()
    with made.store.open(Model(), [group]) as kept:
        assert isinstance(kept, store.PageStore)
        assert kept.facts.format_id == canonical.format_id([group])
        assert (tmp_path / "s" / Model.model_id / kept.facts.format_id).is_dir()


def test_what_parts_cannot_have_is_refused_before_weights_are_drawn(tiny):
    made = tiny(
        "qwen3_next",
        *("store.root=s3://bucket/kv", "store.endpoint=http://127.0.0.1:9"),
        *("store.host_memory=1MiB", "store.max_nbytes=1MiB"),
    )
    with pytest.raises(errors.IncompatiblePlan) as met:
        made.engine()
    for words in ("store.host_memory", "store.max_nbytes", "s3://bucket/kv"):
        assert words in str(met.value)


def test_nothing_is_refused_where_nothing_is_kept(tiny):
    made = tiny("qwen3_next")
    assert made.store.unserved(made.groups()) == []
    assert made.store.open(Model(), made.groups()) is None


def kept_rows(groups):
    """List each part that a store keeps: how long, and the fields of its rows."""
    return [
        (part.name, part.life, part.sizes, [groups[n].fields for n in part.groups])
        for part in store.parts_of(groups)
    ]


@pytest.mark.parametrize("name", TINY)
def test_two_longest_texts_share_a_format_if_and_only_if_their_parts_are_the_same(
    tiny, name
):
    made = tiny(name)
    windows = {layer.window for group in made.groups() for layer in group.layers}
    edges = sorted(window for window in windows if window is not None)
    lengths = sorted({2, 48, *(edge + by for edge in edges for by in (0, 1, 9))})
    groups = [tiny(name, f"serve.max_length={n}").groups() for n in lengths]
    sides = [sum(edge < n for edge in edges) for n in lengths]
    for left, one in enumerate(groups):
        for right, other in enumerate(groups):
            shares = canonical.format_id(one) == canonical.format_id(other)
            assert shares == (kept_rows(one) == kept_rows(other))
            assert shares == (sides[left] == sides[right])
    assert len(set(sides)) == len(edges) + 1


def test_windows_that_are_full_attention_here_share_its_format_and_no_other():
    layers = [
        geometry.LayerSpec(f"l{i}", i, kv_heads=2, head_dim=8, window=window)
        for i, window in enumerate((None, 16, 64, 16))
    ]
    ids = {
        n: canonical.format_id(geometry.group_layers(layers, 4, max_length=n))
        for n in (8, 16, 17, 64, 65, 2048, None)
    }
    full = [dataclasses.replace(layer, window=None) for layer in layers]
    assert ids[8] == ids[16] == canonical.format_id(geometry.group_layers(full, 4))
    assert ids[17] == ids[64] and ids[65] == ids[2048] == ids[None]
    assert len(set(ids.values())) == 3
    alone = [
        canonical.format_id(geometry.group_layers(layers[3:], 4, max_length=n))
        for n in (16, 17)
    ]  # one group of the same bytes, kept otherwise
    assert len(set(alone)) == 2


def test_a_store_names_its_parts_at_every_longest_text(tiny, tmp_path):
    root = f"store.root={tmp_path / 's'}"
    at = {n: tiny("gpt_oss", root, f"serve.max_length={n}") for n in (16, 200, 400)}
    folders = {}
    for length, made in at.items():
        with made.store.open(Model(), made.groups()) as kept:
            folders[length] = kept.facts
    assert folders[200] == folders[400] != folders[16]
