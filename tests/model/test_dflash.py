"""Block drafts: what is kept, what a block sees, and the same logits on pages."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvmem import errors
from kvmem.geometry import Rope, Topology, envelope, group_layers
from kvmem.model import dflash, draft_layers, mtp, parallel
from kvmem.model.dflash_decoder import DFlashDecoder
from kvmem.model.loaded import LoadedModel
from kvmem.model.partitions import partition_of
from kvmem.pool.table import GroupTable

PAGE, TEXT, LENGTH = 4, 22, 3
TABLE = np.array([[3, 1, 4, 7, 5, 11], [0, 8, 2, 9, 6, 12]], np.int32)


class Words:
    """What a model id asks a tokenizer for."""

    identity, template = "words", None


@pytest.fixture(scope="module")
def drafted(decoder_spec, decoder_params):
    """A target, its block draft with weights that matter, and rows and texts of it."""

    def make(layers=2, **changes):
        spec = decoder_spec(**changes)
        target = LoadedModel(spec, decoder_params(spec), Words(), "small")
        own = dflash.spec_of(spec, layers)
        params = decoder_params(own, seed=3)
        wanted = own.own_parameters()
        params = {n: np.float32(x) for n, x in params.items() if n in wanted}
        params["dflash.mask.weight"] = 2 * params["dflash.mask.weight"] - 1
        draft = dflash.with_params(target, layers, params, "of a test")
        rng = np.random.default_rng(5)
        rows = rng.standard_normal((2, TEXT, spec.hidden), np.float32)
        texts = rng.integers(0, spec.vocab, (2, TEXT)).astype(np.int32)
        return target, draft, rows, texts

    return make


@pytest.fixture(scope="module")
def small(drafted):
    return drafted()


def decoder_of(draft):
    partition = partition_of(draft.spec, Topology())
    own = partition.rank_params(draft.params, 0)
    return DFlashDecoder(partition, {n: jnp.asarray(rows) for n, rows in own.items()})


@pytest.fixture(scope="module")
def blocks():
    """`block_logits` of a draft, compiled once a length."""

    @functools.cache
    def compiled(draft, length):
        graph, weights = nnx.split(decoder_of(draft))

        def said(weights, *batch):
            return nnx.merge(graph, weights).block_logits(*batch, length)

        return functools.partial(jax.jit(said), weights)

    def make(draft, rows, texts, anchors, length=LENGTH):
        return np.asarray(compiled(draft, length)(rows, texts, np.int32(anchors)))

    return make


class Paged:
    """The draft on poisoned pages: keeps rows, proposes."""

    def __init__(self, draft, topology=None):
        topology = topology or Topology()
        (group,) = group_layers(draft.spec.layer_specs(), PAGE, domain="draft")
        env = envelope.build(group, topology, 0)
        self.weights = parallel.load(draft.spec, draft.params, topology)
        self.step = jax.jit(
            parallel.make_step((env,)),
            donate_argnums=1,
            static_argnames=("num_logits",),
        )
        self.pages = jnp.full((topology.ranks, 13, env.nbytes), 0xFF, jnp.uint8)

    def keep(self, rows, starts, counts):
        width = rows.shape[1]
        batch = (np.zeros((2, width), np.int32), np.int32(starts), np.int32(counts))
        self.pages, none = self.step(
            self.weights, self.pages, *batch, _tables(), num_logits=0, hidden=rows
        )
        assert none.size == 0

    def propose(self, texts, starts, length=LENGTH):
        starts = np.int32(starts)
        last = np.take_along_axis(texts, starts[:, None], axis=1)
        ones = np.ones(2, np.int32)
        self.pages, logits = self.step(
            self.weights, self.pages, last, starts, ones, _tables(), num_logits=length
        )
        return np.asarray(logits).reshape(2, length, -1)


def _tables():
    return (GroupTable(TABLE, np.zeros(2, np.int32)),)


def by_hand(draft, rows, text, anchor, length):
    """Logits [length, V] of one block by plain numpy, in float64: the judge."""
    spec = draft.spec
    p = {name: array.astype(float) for name, array in draft.params.items()}

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + spec.norm_eps) * weight

    def rope(x, places):  # [n, heads, D]
        half = spec.head_dim // 2
        turn = places[:, None, None] * spec.rope.theta ** (-np.arange(half) / half)
        pairs = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * turn)
        return np.concatenate([pairs.real, pairs.imag], axis=-1)

    context = norm(rows[:anchor].astype(float), p["dflash.hidden_norm.weight"])
    context = context @ p["dflash.fuse.weight"].T
    embed = p["model.embed_tokens.weight"]
    x = np.stack([embed[text[anchor]], *[p["dflash.mask.weight"]] * length])
    places = np.arange(anchor + length + 1)
    for i in range(spec.layers):
        at = {n.split(".", 3)[3]: a for n, a in p.items() if f"layers.{i}." in n}
        seen = np.concatenate([context, x])
        h = norm(seen, at["input_layernorm.weight"])
        q, k, v = (
            (h @ at[f"self_attn.{name}_proj.weight"].T).reshape(
                len(h), -1, spec.head_dim
            )
            for name in "qkv"
        )
        if spec.qk_norm:
            q = norm(q, at["self_attn.q_norm.weight"])
            k = norm(k, at["self_attn.k_norm.weight"])
        q, k = rope(q, places)[anchor:], rope(k, places)
        heads = []
        for head in range(spec.heads):
            shared = head * spec.kv_heads // spec.heads
            scores = q[:, head] @ k[:, shared].T * spec.head_dim**-0.5
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(weights / weights.sum(-1, keepdims=True) @ v[:, shared])
        x = x + np.concatenate(heads, -1) @ at["self_attn.o_proj.weight"].T
        h = norm(x, at["post_attention_layernorm.weight"])
        gate, up = (h @ at[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ at["mlp.down_proj.weight"].T
    head = p["model.embed_tokens.weight" if spec.tie_embeddings else "lm_head.weight"]
    return (norm(x, p["model.norm.weight"]) @ head.T)[1:]


@pytest.mark.parametrize(
    "changes", [{}, dict(qk_norm=True, tie_embeddings=False, rope=Rope(theta=500.0))]
)
def test_blocks_have_the_logits_computed_by_hand(drafted, blocks, changes):
    _, draft, rows, texts = drafted(**changes)
    anchors = [[0, 1, 7, 21], [2, 3, 20, 11]]  # with no row before it, and at the end
    found = blocks(draft, rows, texts, anchors)
    for text, of_text in enumerate(anchors):
        for at, anchor in enumerate(of_text):
            want = by_hand(draft, rows[text], texts[text], anchor, LENGTH)
            np.testing.assert_allclose(found[text, at], want, atol=1e-4)


def test_a_block_sees_the_rows_before_it_and_all_of_itself(small, blocks):
    _, draft, rows, texts = small
    anchors = [[9], [12]]
    found = blocks(draft, rows, texts, anchors)
    behind, before = rows.copy(), rows.copy()
    behind[0, 9:], behind[1, 12:] = np.nan, np.nan
    before[:, 0] += 1.0
    np.testing.assert_array_equal(blocks(draft, behind, texts, anchors), found)
    assert np.abs(blocks(draft, before, texts, anchors) - found).max() > 1e-3
    other = texts.copy()
    other[0, :9], other[1, 13:] = 0, 0  # tokens are read at the anchor alone
    np.testing.assert_array_equal(blocks(draft, rows, other, anchors), found)
    # The first mask sees the later ones: in a longer block it says something else.
    longer = blocks(draft, rows, texts, anchors, LENGTH + 1)[:, :, :LENGTH]
    assert np.abs(longer - found).max() > 1e-3


@pytest.mark.parametrize("cuts", [(22,), (5, 9, 22), (1, 2, 3, 13, 14, 22)])
def test_blocks_on_pages_are_those_of_whole_texts_in_any_cuts(small, blocks, cuts):
    _, draft, rows, texts = small
    paged, start = Paged(draft), 0
    for end in cuts:
        paged.keep(rows[:, start:end], [start] * 2, [end - start] * 2)
        start = end
    for anchors in ([6, 19], [21, 1], [0, 0]):
        want = blocks(draft, rows, texts, np.array(anchors)[:, None])[:, 0]
        np.testing.assert_allclose(paged.propose(texts, anchors), want, atol=1e-4)


def test_a_proposal_writes_nothing_and_reads_nothing_that_is_not_before_it(small):
    """Poison behind the text stays there, and does not reach a block."""
    _, draft, rows, texts = small
    paged = Paged(draft)
    paged.keep(rows[:, :9], [0, 0], [9, 6])
    before = np.asarray(paged.pages)
    first = paged.propose(texts, [9, 6])
    assert np.isfinite(first).all()
    np.testing.assert_array_equal(np.asarray(paged.pages), before)
    again = paged.propose(texts, [9, 6])
    np.testing.assert_array_equal(again, first)
    # Rows of rejected tokens lie behind the text; they are written over, or not seen.
    paged.keep(rows[::-1, :4], [9, 6], [4, 4])
    np.testing.assert_array_equal(paged.propose(texts, [9, 6]), first)


def test_what_is_kept_of_a_token_follows_from_its_row_alone(small):
    _, draft, rows, _ = small
    whole, parts, other = Paged(draft), Paged(draft), Paged(draft)
    whole.keep(rows[:, :12], [0, 0], [12, 12])
    for start in range(0, 12, 4):
        parts.keep(rows[:, start : start + 4], [start] * 2, [4, 4])
    changed = rows[:, :12].copy()
    changed[:, 2] = 0
    other.keep(changed, [0, 0], [12, 12])
    first = np.asarray(whole.pages).view(np.float32)
    np.testing.assert_allclose(np.asarray(parts.pages).view(np.float32), first, 1e-5)
    differs = (np.asarray(other.pages).view(np.float32) != first) & np.isfinite(first)
    pages = np.unique(np.nonzero(differs)[1])
    assert pages.tolist() == sorted(TABLE[:, 0])  # token 2 lies in the first page


@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_together_propose_what_one_does(drafted, blocks, tp):
    _, draft, rows, texts = drafted(heads=8, kv_heads=4, head_dim=4, mlp=51)
    paged = Paged(draft, Topology(tp))
    paged.keep(rows[:, :20], [0, 0], [20, 20])
    want = blocks(draft, rows, texts, [[13], [20]])[:, 0]
    found = paged.propose(texts, [13, 20])[..., : draft.spec.vocab]
    np.testing.assert_allclose(found, want, atol=1e-4)


def test_one_token_is_a_block_too(small, blocks):
    _, draft, rows, texts = small
    paged = Paged(draft)
    paged.keep(rows[:, :9], [0, 0], [9, 9])
    want = blocks(draft, rows, texts, [[9], [4]], 1)[:, 0]
    np.testing.assert_allclose(paged.propose(texts, [9, 4], 1), want, atol=1e-4)


def test_the_drafts_own_tensors_are_saved_and_come_back(small, tmp_path):
    target, draft, *_ = small
    draft_layers.save(tmp_path / "block", draft, target)
    found = draft_layers.load(tmp_path / "block", target, 2, dflash.with_params)
    assert found.spec == draft.spec
    assert found.spec.layer_specs()[1].name == "draft.1"
    for name, array in draft.params.items():
        np.testing.assert_array_equal(found.params[name], array)
    shared = target.params.keys() & found.params.keys()
    assert {n.split(".")[1] for n in shared - found.spec.own_parameters().keys()} == {
        *("embed_tokens", "norm")
    }
    assert not {n for n in found.spec.own_parameters() if "embed_tokens" in n}
    drawn, same = dflash.draw(target, 1, 4), dflash.draw(target, 1, 4)
    for name, array in drawn.params.items():
        np.testing.assert_array_equal(same.params[name], array)
    assert np.abs(drawn.params["dflash.mask.weight"]).max() > 0


def test_layers_of_another_kind_or_for_another_model_are_refused(
    small, tmp_path, decoder_spec
):
    target, draft, *_ = small
    draft_layers.save(tmp_path / "chain", mtp.draw(target), target)
    with pytest.raises(errors.FormatMismatch, match="dflash.fuse.weight is missing"):
        draft_layers.load(tmp_path / "chain", target, 1, dflash.with_params)
    with pytest.raises(errors.IncompatiblePlan, match="verify nothing"):
        dflash.spec_of(draft.spec, 1)
