"""[store] for a model of several groups: what it opens, and what it refuses."""

import pytest

from kvmem import canonical, config, errors, store
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
