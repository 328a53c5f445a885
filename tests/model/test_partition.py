import numpy as np
import pytest

from kvmem.errors import IncompatiblePlan
from kvmem.geometry import Topology
from kvmem.model.partition import Padding, Partition


def test_smollm2_on_nine_ranks_pads_mlp_and_vocabulary(decoder_spec):
    spec = decoder_spec(
        hidden=576, mlp=1536, layers=30, heads=9, kv_heads=3, head_dim=64, vocab=49_152
    )
    nine = Partition(spec, Topology(tp=9))
    assert nine.paddings == (
        Padding("mlp", 1536, 1539),
        Padding("vocab", 49_152, 49_158),
    )
    assert (nine.q_heads, nine.kv_heads, nine.mlp, nine.vocab) == (1, 1, 171, 5462)
    assert Partition(spec, Topology(tp=3)).paddings == ()
    assert Partition(spec).paddings == ()


@pytest.mark.case("LAY-13")
def test_six_kv_heads_on_tp_four_are_refused_with_the_sizes_that_work(decoder_spec):
    spec = decoder_spec(heads=24, kv_heads=6)
    with pytest.raises(
        IncompatiblePlan, match="6 KV heads .* TP 4.* 1, 2, 3, 6, 12, 24"
    ):
        Partition(spec, Topology(tp=4))


def test_query_heads_that_do_not_divide_are_refused_with_the_sizes_that_work(
    decoder_spec,
):
    spec = decoder_spec(heads=18, kv_heads=2)
    with pytest.raises(
        IncompatiblePlan, match=r"18 query heads .* on TP 4.* 1, 2, 6, 18"
    ):
        Partition(spec, Topology(tp=4))


@pytest.mark.case("LAY-13")
@pytest.mark.parametrize("heads, kv_heads", [(9, 3), (32, 8), (12, 4), (6, 6)])
def test_every_size_that_a_refusal_names_works_and_no_other(
    heads, kv_heads, decoder_spec
):
    spec = decoder_spec(heads=heads, kv_heads=kv_heads)
    refused, named = [], set()
    for tp in range(1, 2 * heads + 1):
        try:
            Partition(spec, Topology(tp=tp))
        except IncompatiblePlan as error:
            refused.append(tp)
            named.add(str(error).rpartition("Use TP ")[2].rstrip("."))
    works = [tp for tp in range(1, 2 * heads + 1) if tp not in refused]
    assert named == {", ".join(map(str, works))}


def test_ranks_that_share_tokens_have_no_weights_of_their_own(decoder_spec):
    with pytest.raises(IncompatiblePlan, match="hold the same weights. Cut them"):
        Partition(decoder_spec(), Topology(tp=2, dcp=2))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_shapes_are_those_of_the_arrays_of_every_rank(tp, decoder_spec, decoder_params):
    spec = decoder_spec(qkv_bias=True, qk_norm=True, tie_embeddings=False)
    part, params = Partition(spec, Topology(tp=tp)), decoder_params(spec)
    for rank in range(tp):
        own = part.rank_params(params, rank)
        assert {name: array.shape for name, array in own.items()} == part.shapes()
    assert part.num_elements == sum(array.size for array in own.values())


def test_ranks_together_hold_every_row_once(decoder_spec, decoder_params):
    spec = decoder_spec(heads=4, kv_heads=2)
    params = decoder_params(spec)
    part = Partition(spec, Topology(tp=4))
    own = [part.rank_params(params, rank) for rank in range(4)]
    layer = "model.layers.1."
    embed = np.concatenate([o["embed"] for o in own])
    np.testing.assert_array_equal(embed[:67], params["model.embed_tokens.weight"])
    assert embed.shape == (68, 32) and not embed[67:].any()
    for i, name in enumerate(("gate", "up")):
        rows = np.concatenate([np.split(o["layers.1.gate_up"], 2)[i] for o in own])
        whole = params[f"{layer}mlp.{name}_proj.weight"]
        np.testing.assert_array_equal(rows[:50], whole)
        assert not rows[50:].any()
    k = params[f"{layer}self_attn.k_proj.weight"]
    for rank in range(4):  # a KV head stands on two ranks
        held = own[rank]["layers.1.qkv"][8:16]
        np.testing.assert_array_equal(held, k[8 * (rank // 2) : 8 * (rank // 2) + 8])
    out = np.concatenate([o["layers.1.out"] for o in own], axis=1)
    np.testing.assert_array_equal(out, params[f"{layer}self_attn.o_proj.weight"])
    down = np.concatenate([o["layers.1.down"] for o in own], axis=1)
    np.testing.assert_array_equal(down[:, :50], params[f"{layer}mlp.down_proj.weight"])
