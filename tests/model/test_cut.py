"""A cut keeps the first layers of a model as they are."""

import pytest

from kvmem import errors
from kvmem.model import cut
from kvmem.model.loaded import LoadedModel


@pytest.fixture
def whole(decoder_spec, decoder_params):
    spec = decoder_spec(layers=3)
    return LoadedModel(spec, decoder_params(spec), None, "whole")


def test_the_first_layers_share_their_models_arrays(whole):
    first = cut.first_layers(whole, 2)
    assert (first.spec.layers, cut.num_layers(first.spec)) == (2, 2)
    assert set(first.params) == set(first.spec.parameters())
    for name, array in first.params.items():
        assert array is whole.params[name]
    assert first.spec.layer_specs() == whole.spec.layer_specs()[:2]


@pytest.mark.parametrize("layers", [0, 4])
def test_a_cut_outside_of_the_model_is_refused(whole, layers):
    with pytest.raises(errors.ConfigError, match="from 1 to 3"):
        cut.first_layers(whole, layers)
