"""Weights one ulp apart, another rope, a damaged chunk: nothing wrong is ever reused.

vLLM #49261 and #56311 met the first two, under one name and with diverging output;
#49176 a failed load that stayed a hit.
"""

import dataclasses
import os

import numpy as np
import pytest

from kvmem import geometry, store
from kvmem.canonical import format_id
from kvmem.model.loaded import LoadedModel
from kvmem.serve import SamplingParams
from kvmem.store import row_files

CHUNK = 8


def text(seed, length):
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def greedy(count):
    return SamplingParams(max_tokens=count, ignore_eos=True)


def one_ulp(model):
    """Return the model with one weight moved by one unit in the last place."""
    name = "model.layers.1.mlp.down_proj.weight"
    moved = model.params[name].copy()
    moved[0, 0] = np.nextafter(moved[0, 0], np.float32(9))
    return LoadedModel(
        model.spec, model.params | {name: moved}, model.tokenizer, model.source
    )


def rope(theta):
    def change(model):
        spec = dataclasses.replace(model.spec, rope=geometry.Rope(theta=theta))
        return LoadedModel(spec, model.params, model.tokenizer, model.source)

    return change


@pytest.fixture
def changes():
    """What is done to the next models."""
    return []


@pytest.fixture
def tiny_model(tiny_model, changes):
    def make(*args):
        model = tiny_model(*args)
        for change in changes:
            model = change(model)
        return model

    return make


@pytest.fixture
def open_store(tmp_path, tiny_model):
    def make(**options):
        model = tiny_model()
        groups = geometry.group_layers(model.spec.layer_specs("float32"), 4)
        return store.PageStore.open(
            tmp_path / "root",
            model.model_id,
            format_id(groups),
            record_nbytes=groups[0].record_nbytes,
            chunk_tokens=CHUNK,
            **options,
        )

    return make


def reused(engine, open_store, prompt):
    """Generate in a fresh process's stead; return what was stored before and output."""
    with open_store() as kept:
        (output,) = engine(store=kept, prefix_cache=False).generate(prompt, greedy(4))
        return output.stored_tokens, output.output_ids


@pytest.mark.parametrize("change", [one_ulp, rope(9_999.0)], ids=["ulp", "theta"])
def test_another_model_under_one_name_shares_no_hit(
    engine, open_store, changes, tiny_model, change
):
    prompt, first = text(1, 40), tiny_model()
    assert reused(engine, open_store, prompt)[0] == 0
    changes.append(change)
    other = tiny_model()
    assert other.spec.name == first.spec.name and other.model_id != first.model_id
    assert reused(engine, open_store, prompt)[0] == 0
    assert reused(engine, open_store, prompt)[0] == 32
    changes.clear()
    assert reused(engine, open_store, prompt)[0] == 32


def test_of_five_chunks_with_a_truncated_one_the_good_prefix_is_loaded(
    engine, open_store, tmp_path, monkeypatch
):
    """Number 3 is short: 0 to 2 are loaded, the rest is computed, asked for once."""
    monkeypatch.setattr(row_files, "FILE_NBYTES", 1)  # a file a chunk
    prompt = text(2, 5 * CHUNK + 1)
    assert reused(engine, open_store, prompt)[0] == 0
    (rows,) = tmp_path.rglob("orbax/records/c")
    files = {int(p.relative_to(rows).parts[0]): p for p in rows.rglob("*")}
    path = files[3]
    os.truncate(path, path.stat().st_size - 1)
    (whole,) = engine().generate(prompt, greedy(4))
    with open_store() as kept:
        asked, get = [], kept.get
        monkeypatch.setattr(
            kept, "get", lambda *args, **more: asked.append(args) or get(*args, **more)
        )
        made = engine(store=kept, prefix_cache=False)
        outputs = made.generate([prompt, prompt], greedy(4))
        assert [output.stored_tokens for output in outputs] == [24, 24]
        assert len(asked) <= 2 * len(outputs)
        assert {output.output_ids for output in outputs} == {whole.output_ids}
        (healed,) = made.generate(prompt, greedy(4))
        assert healed.stored_tokens == 40 and healed.output_ids == whole.output_ids


@pytest.mark.case("PFX-10")
def test_a_prompt_shorter_than_a_long_page_says_so_each_time(engine):
    made = engine(page_size=256, pages=2, max_length=256)
    for _ in range(2):
        (output,) = made.generate(text(3, 34), greedy(1))
        assert (output.cached_tokens, output.miss_reason) == (
            0,
            "shorter than one page",
        )
    assert made.stats().misses == {"shorter than one page": 2}
