"""The table [speculative] makes the draft that it plans."""

import dataclasses

import jax
import numpy as np
import pytest

from kvmem import errors, geometry, settings
from kvmem.config import (
    Config,
    ModelConfig,
    PoolConfig,
    ServeConfig,
    StoreConfig,
    load,
)
from kvmem.config.speculative import SpeculativeConfig
from kvmem.model import dflash, draft_layers, draft_spec, mtp
from kvmem.serve import SamplingParams
from kvmem.speculative import draft_term

FACTS = {
    "model_type": "gpt_oss",
    "vocab_size": 257,
    "max_position_embeddings": 512,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 10,
}
SERVE = ServeConfig(
    max_batch=2,
    max_length=48,
    prefill_chunk=16,
    batches=(2,),
    chunks=(16,),
    widths=(48,),
)
PROMPTS = [[5, 9, 7, 5, 9, 7, 5, 9], [1, 2, 3]]


def config(windows=1, root=None, **asked):
    """Of the two layers `windows` have one; records are kept where a root is named."""
    draft, types = asked.pop("draft", None), ["sliding_attention", "full_attention"]
    facts = FACTS | {"layer_types": types[:1] * windows + types[1:] * (2 - windows)}
    return Config(
        model=ModelConfig(facts=settings.Table(facts), seed=1),
        draft=draft,
        pool=PoolConfig(page_size=4, memory="400KB", checked=True, poison=True),
        serve=SERVE,
        store=StoreConfig(root, 4) if root else StoreConfig(),
        speculative=SpeculativeConfig(**asked),
    )


@pytest.fixture(scope="module")
def plain():
    return generated(config())[1]


def tiny_facts(model):
    """The tiny model's config.json, where it differs from Llama's."""
    return {
        "vocab_size": model.spec.vocab,
        "max_position_embeddings": 512,
        "hidden_size": model.spec.hidden,
        "intermediate_size": model.spec.mlp,
        "num_attention_heads": model.spec.heads,
        "num_hidden_layers": model.spec.layers,
        "num_key_value_heads": model.spec.kv_heads,
        "head_dim": model.spec.head_dim,
        "torch_dtype": "float32",
        "tie_word_embeddings": True,
    }


def generated(made):
    engine = made.engine()
    greedy = SamplingParams(max_tokens=12, ignore_eos=True)
    outputs = engine.generate(PROMPTS, greedy)
    return engine, [output.output_ids for output in outputs]


@pytest.mark.parametrize(
    "asked",
    [
        {"algorithm": "ngram", "draft_tokens": 3, "max_match": 2},
        {"algorithm": "frozen_kv", "steps": 2, "layers": 1},
        pytest.param(
            {"algorithm": "two_engine", "steps": 3, "layers": 1}, marks=pytest.mark.long
        ),
        pytest.param(
            {"algorithm": "mtp", "steps": 3, "layers": 2}, marks=pytest.mark.long
        ),
        pytest.param({"algorithm": "dspark", "steps": 3}, marks=pytest.mark.long),
        pytest.param({"algorithm": "dflash", "seed": 4}, marks=pytest.mark.long),
    ],
    ids=lambda asked: asked["algorithm"],
)
def test_an_engine_drafts_as_its_table_says(plain, asked):
    """Behind a window too, in the bytes that its plan pays for."""
    made = config(**asked)
    engine, found = generated(made)
    assert found == plain
    stats = engine.stats().drafting
    assert stats.drafted > 0 and not stats.faults
    proposer, solved = engine.verifier.proposer, made.budget()
    assert proposer.num_drafted == made.spec_plan().num_drafted
    assert engine.pool.pages.nbytes == sum(pool.nbytes for pool in solved.pools)
    assert [group.name for group in engine.own_groups] == ["full", "window10"]
    if asked["algorithm"] in ("dspark", "dflash"):
        planned = solved.draft_pages * solved.draft_page_nbytes
        assert proposer.pages.nbytes == planned > 0


TINY = ("gpt_oss", "gemma3", "deepseek_v32", "qwen3_next")


@pytest.mark.parametrize("algorithm", ["mtp", "dspark", "dflash"])
@pytest.mark.parametrize("name", TINY)
def test_draft_layers_behind_a_hybrid_are_planned_as_they_run(
    repo_root, name, algorithm
):
    """The rows of the plan are those of the layers that would be drawn."""
    asked = [f"speculative.algorithm={algorithm}", "speculative.layers=2"]
    path = repo_root / f"configs/models/{name}_tiny.toml"
    plain, made = load(path), load(path, [*asked, "topology.dcp=2"])
    kind = draft_spec.spec_of(draft_spec.DraftSpec, made.spec, 2)
    layers = kind.layer_specs(made.model.cache_dtype())
    page = made.pool.page_size
    assert made.draft_groups() == geometry.group_layers(layers, page, domain="draft")
    assert made.groups() == plain.groups()
    solved, topology = made.budget(), made.topology
    term = draft_term(made.spec_plan(), made.draft_groups(), topology, made.pool.order)
    if algorithm == "mtp":
        assert [group.domain for group in solved.groups][-1] == "draft"
        assert made.manager().name == "grouped"
        first, last = solved.groups[0], solved.groups[-1]
        assert last.pages == first.pages > 0  # for every token, neither fewer nor more
    else:
        paid = solved.draft_pages * solved.draft_page_nbytes
        assert paid == term.at(solved.pools[0].pages * page) > 0
    assert solved.used_nbytes <= solved.limit.nbytes


def test_a_draft_model_of_its_own_takes_the_bytes_that_were_planned(plain):
    small = ModelConfig(facts=settings.Table(FACTS | {"head_dim": 4}), seed=2)
    made = config(algorithm="two_engine", steps=3, draft=small)
    engine, found = generated(made)
    assert found == plain
    solved, pages = made.budget(), engine.verifier.proposer.pages
    planned = solved.draft_pages * solved.draft_page_nbytes
    assert pages.pool.pages.nbytes == planned
    assert engine.verifier.proposer.claims()


def test_a_table_chooses_how_sampled_tokens_are_accepted():
    small = ModelConfig(facts=settings.Table(FACTS), seed=2)
    sampled = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0, seed=5)

    def tokens(**asked):
        outputs = config(**asked).engine().generate(PROMPTS, sampled)
        return [output.output_ids for output in outputs]

    drafted = {"algorithm": "two_engine", "steps": 3, "draft": small}
    assert tokens(**drafted, acceptance="rejection") != tokens()  # of another draw


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"algorithm": "frozen_kv", "topk": 2}, "linear"),
        ({"algorithm": "mtp", "windows": 2}, "go with pages of full attention"),
        ({"algorithm": "dflash", "windows": 2}, "go with pages of full attention"),
        ({"algorithm": "mtp", "stored": True}, "windows and states have passed it"),
        ({"algorithm": "dspark", "stored": True}, "or draft with dflash"),
        (
            {"draft": ModelConfig(facts=settings.Table(FACTS), seed=2)},
            "by an algorithm",
        ),
    ],
)
def test_what_is_not_run_is_refused_before_a_weight_is_drawn(
    monkeypatch, tmp_path, asked, words
):
    if asked.pop("stored", False):
        asked["root"] = str(tmp_path)
    monkeypatch.setattr(ModelConfig, "load", lambda self: pytest.fail("too late"))
    with pytest.raises(errors.IncompatiblePlan, match=words):
        config(**asked).engine()


@pytest.mark.parametrize(
    "algorithm", ["dspark", "dflash", pytest.param("mtp", marks=pytest.mark.long)]
)
def test_draft_layers_are_drawn_or_read_as_the_table_says(
    llama_config, tiny_model, tmp_path, algorithm
):
    model, path = tiny_model(), tmp_path / "layers.safetensors"
    kind = dflash if algorithm == "dflash" else mtp
    draft_layers.save(path, kind.draw(model, 1, seed=7), model)
    found = []
    for source in ({"seed": 7}, {"weights": str(path)}):
        asked = SpeculativeConfig(algorithm, draft_tokens=3, **source)
        made = Config(
            model=ModelConfig(source=llama_config(**tiny_facts(model))),
            pool=PoolConfig(page_size=4, memory="400KB", checked=True, poison=True),
            serve=SERVE,
            speculative=asked,
        )
        engine = made.engine(model)
        proposer = engine.verifier.proposer
        assert proposer.num_drafted == 3
        found.append(proposer._stepper.weights)
        if algorithm != "mtp":
            solved = made.budget()
            planned = solved.draft_pages * solved.draft_page_nbytes
            assert proposer.pages.nbytes == planned and proposer.claims()
    jax.tree.map(np.testing.assert_array_equal, *found)
    engine.generate(PROMPTS[0], SamplingParams(max_tokens=5))
    assert engine.stats().drafting.drafted > 0


@pytest.mark.parametrize(
    ("algorithm", "store"),
    [
        pytest.param("dspark", {}, marks=pytest.mark.long),
        ("two_engine", {"host_memory": "1MB", "max_nbytes": "1MB"}),
        pytest.param("mtp", {}, marks=pytest.mark.long),
        pytest.param("dflash", {"host_memory": "1MB"}, marks=pytest.mark.long),
    ],
)
def test_target_and_draft_are_stored_as_the_tables_say(
    llama_config, tiny_model, tmp_path, algorithm, store
):
    """In one part of a store, behind RAM and under a budget where those are asked for;
    other draft layers find nothing."""
    found, prompt = [], list(range(40, 70))
    for seed in (7, 7, 8):
        asked = {"seed": seed}
        if algorithm == "two_engine":
            asked = {"layers": 1 if seed == 7 else 2}
        made = Config(
            model=ModelConfig(source=llama_config(**tiny_facts(tiny_model()))),
            pool=PoolConfig(page_size=4, memory="400KB", checked=True, poison=True),
            serve=SERVE,
            store=StoreConfig(str(tmp_path / "root"), 4, **store),
            speculative=SpeculativeConfig(algorithm, **asked),
        )
        with made.engine(tiny_model()) as engine:
            greedy = SamplingParams(max_tokens=6, ignore_eos=True)
            (output,) = engine.generate(prompt, greedy)
        found.append((output.stored_tokens, output.output_ids))
    (none, first), (stored, second), (other, third) = found
    assert none == other == 0 and stored >= 27
    assert first == second == third
    ids = {path.name for path in (tmp_path / "root").iterdir() if path.is_dir()}
    assert tiny_model().model_id not in ids  # the target's records alone are nowhere


@pytest.mark.long
def test_a_block_draft_behind_windows_is_stored_with_its_target(tmp_path, plain):
    """A text that comes back is drafted for as if it had never left."""
    root, said, prompt = str(tmp_path), [], list(range(40, 67))
    for stored in (None, 0, 24):
        made = config(algorithm="dflash", root=root if stored is not None else None)
        with made.engine() as engine:
            proposer, tokens = engine.verifier.proposer, []
            propose = proposer.propose

            def and_note(sequences, most, propose=propose, tokens=tokens):
                proposal = propose(sequences, most)
                tokens.append(proposal.tokens)
                return proposal

            proposer.propose = and_note
            greedy = SamplingParams(max_tokens=6, ignore_eos=True)
            (output,) = engine.generate(prompt, greedy)
            assert output.stored_tokens == (stored or 0)
            assert not engine.stats().drafting.faults
        said.append((output.output_ids, tokens))
    assert said[0] == said[1] == said[2] and said[0][1]


def test_a_store_beside_a_draft_with_a_window_is_refused(tmp_path):
    made = dataclasses.replace(
        config(algorithm="two_engine", layers=2, steps=3),
        store=StoreConfig(root=str(tmp_path / "store")),
    )
    with pytest.raises(errors.IncompatiblePlan, match="all that its draft keeps"):
        made.engine()
