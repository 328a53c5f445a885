"""The first layers of hybrids, whose layers differ."""

import pytest

from kvmem import errors
from kvmem.model import cut
from kvmem.model.hybrid.spec import HybridSpec


@pytest.mark.parametrize(
    ("family", "layers"),
    [("gpt_oss", 1), ("gemma3", 2), ("gemma3 shared", 3), ("qwen3_next", 1)],
)
def test_a_cut_hybrid_has_the_mixers_of_the_whole(model_of, family, layers):
    model = model_of(family)
    first = cut.first_layers(model, layers)
    assert first.spec.mixers == model.spec.mixers[:layers]
    assert set(first.params) == set(first.spec.parameters())
    assert all(array is model.params[name] for name, array in first.params.items())


def test_layers_whose_kind_depends_on_their_number_are_refused(facts_of):
    spec = HybridSpec("shared", facts_of("gemma3 shared"))
    # two of four layers read the keys of others; of the first one none is left to read
    assert cut.spec_of_first(spec, 2).mixers == spec.mixers[:2]
    with pytest.raises(errors.ConfigError, match="from 1 to 4"):
        cut.spec_of_first(spec, 5)
