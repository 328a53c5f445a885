"""Draft layers behind hybrids: their shape, and the two ends that are the target's."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvmem import errors
from kvmem.geometry import Rope, Topology
from kvmem.model import dflash, draft_spec, mtp
from kvmem.model.dflash_decoder import DFlashDecoder
from kvmem.model.draft_spec import DraftSpec
from kvmem.model.hybrid.decoder import HybridDecoder
from kvmem.model.hybrid.spec import HybridSpec
from kvmem.model.mtp_decoder import MtpDecoder
from kvmem.model.ops import rms_norm
from kvmem.model.partitions import partition_of

KINDS = ((mtp, MtpDecoder), (dflash, DFlashDecoder))


@pytest.fixture
def spec_of(facts_of):
    def make(family, layers=1, **changes):
        target = HybridSpec(family, facts_of(family, **changes))
        return target, draft_spec.spec_of(DraftSpec, target, layers)

    return make


@pytest.mark.parametrize(
    ("family", "heads", "rope", "extras"),
    [
        ("gpt_oss", (4, 2, 8), Rope(150_000.0), {"qkv_bias"}),
        ("gemma3", (4, 2, 8), Rope(1_000_000.0), {"qk_norm"}),
        ("qwen3_next", (4, 2, 16), Rope(10_000_000.0, width=4), {"qk_norm"}),
        ("deepseek_v32", (4, 1, 8), Rope(10_000.0), set()),
    ],
)
def test_heads_and_rope_are_those_of_the_targets_full_attention(
    spec_of, family, heads, rope, extras
):
    """Not a window's, whose rope may be another; of latents one head for all."""
    target, spec = spec_of(family, layers=2)
    assert (spec.heads, spec.kv_heads, spec.head_dim) == heads
    assert spec.rope == rope
    assert {name for name in ("qkv_bias", "qk_norm") if getattr(spec, name)} == extras
    assert (spec.hidden, spec.mlp, spec.vocab) == (target.hidden, target.mlp, 259)
    for layer in spec.layer_specs("float32"):
        assert (layer.kind, layer.window, layer.shares) == ("gqa", None, None)
    assert [layer.name for layer in spec.layer_specs()] == ["draft.0", "draft.1"]


def test_where_every_layer_has_a_window_the_draft_has_none(spec_of):
    _, spec = spec_of("gemma3", layer_types=["sliding_attention"] * 3)
    assert spec.rope == Rope(10_000.0)
    assert [layer.window for layer in spec.layer_specs()] == [None]


def test_a_target_without_attention_has_no_shape_for_them(spec_of):
    with pytest.raises(errors.IncompatiblePlan, match="from its attention"):
        spec_of("qwen3_next", layer_types=["linear_attention"] * 2)


def test_layers_that_draft_have_no_draft(spec_of):
    _, spec = spec_of("gpt_oss")
    with pytest.raises(errors.IncompatiblePlan, match="verify nothing"):
        draft_spec.spec_of(DraftSpec, spec, 1)


@pytest.mark.parametrize(
    "family", [pytest.param("gpt_oss", marks=pytest.mark.long), "gemma3"]
)
@pytest.mark.parametrize(("kind", "decoder"), KINDS, ids=["mtp", "dflash"])
def test_embeddings_and_logits_are_the_targets(model_of, family, kind, decoder):
    """Scaled where it scales them, normed around zero where it does."""
    target = model_of(family)
    draft = kind.draw(target, 1, seed=4)
    partition = partition_of(draft.spec, Topology())
    own = partition.rank_params(draft.params, 0)
    made = decoder(partition, {name: jnp.asarray(rows) for name, rows in own.items()})
    theirs = HybridDecoder.from_params(target.spec, target.params)
    tokens = jnp.asarray([[3, 250, 7, 3]], jnp.int32)
    found = made.embedded(tokens, None)
    np.testing.assert_array_equal(found, theirs._embedded(tokens, None))
    rng = np.random.default_rng(5)
    rows = jnp.asarray(rng.standard_normal((1, 4, 32), np.float32))
    np.testing.assert_array_equal(made.head(rows), theirs._logits(rows, None))
    assert draft.spec.zero_norm == (family == "gemma3")
    if draft.spec.zero_norm:
        plain = rms_norm(rows, made.norm, draft.spec.norm_eps)
        assert np.abs(made.leave(rows) - plain).max() > 0.1


@pytest.mark.parametrize(("kind", "decoder"), KINDS, ids=["mtp", "dflash"])
def test_only_the_drafts_own_tensors_are_drawn(model_of, kind, decoder):
    target = model_of("gemma3")
    draft = kind.draw(target, 2, seed=4)
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        assert draft.params[name] is target.params[name]
    assert "lm_head.weight" not in draft.params  # its head is its embeddings
    own = draft.spec.own_parameters()
    shared = {"model.embed_tokens.weight", "model.norm.weight"}
    assert draft.params.keys() == own.keys() | shared
    assert own["model.layers.1.self_attn.q_norm.weight"] == (8,)
