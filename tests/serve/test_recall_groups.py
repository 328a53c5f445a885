"""Between pages of several groups and a store of parts: all of a text, or nothing."""

import numpy as np
import pytest

from kvmem import geometry, store
from kvmem.canonical import format_id
from kvmem.serve import SamplingParams

KINDS = ("window", "indexer", "state")
CHUNK = 4


def text(seed, length):
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def greedy(count):
    return SamplingParams(max_tokens=count, ignore_eos=True)


@pytest.fixture
def open_parts(tmp_path, hybrid_model):
    """Open the parts of a hybrid on one root; every store is closed at the end."""
    made = []

    def open_(kind, chunk=CHUNK, **options):
        model = hybrid_model(kind)
        groups = geometry.group_layers(model.spec.layer_specs("float32"), 16)
        parts, ids = store.parts_of(groups), (model.model_id, format_id(groups))
        root = tmp_path / f"root{chunk}"
        made.append(store.PartedStore.open(root, *ids, parts, chunk, **options))
        return made[-1]

    yield open_
    for each in made:
        each.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 4, 5, 16, 31, 32, 33])
def test_a_text_is_resumed_by_an_engine_that_never_saw_it(
    hybrid_engine, hybrid_dense, open_parts, kind, length
):
    """At lengths of k chunks and one less, where vLLM #51094 went a token too far."""
    prompt = text(length, length)
    with open_parts(kind) as kept:
        (first,) = hybrid_engine(kind, store=kept).generate(prompt, greedy(20))
    longer = [*prompt, *first.output_ids]
    assert first.output_ids == hybrid_dense(kind, prompt, 20)
    with open_parts(kind, read_only=True) as kept:
        made = hybrid_engine(kind, store=kept, prefix_cache=False)
        for known in (prompt, longer):
            (again,) = made.generate(known, greedy(6))
            assert again.stored_tokens == (len(known) - 1) // CHUNK * CHUNK
            assert again.output_ids == hybrid_dense(kind, known, 6)
    assert made.accounts.in_use == 0
