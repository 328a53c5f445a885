"""The engine: what comes out does not depend on who else is served, or how."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvmem import errors, geometry, store
from kvmem.canonical import format_id
from kvmem.model import attention
from kvmem.model.decoder import Decoder
from kvmem.serve.request import SamplingParams

EOS = 256
LONG = pytest.mark.long


def text(seed, length):
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def greedy(count, **more):
    return SamplingParams(max_tokens=count, ignore_eos=True, **more)


@pytest.fixture
def dense(tiny_model):
    """Greedy tokens of a model that keeps no cache."""

    def make(prompt, count, kv_heads=4):
        model = tiny_model(kv_heads)
        decoder = Decoder.from_params(model.spec, model.params)
        tokens = list(prompt)
        for _ in range(count):
            padded = jnp.asarray([tokens + [0] * (96 - len(tokens))], jnp.int32)
            tokens.append(int(jnp.argmax(decoder.dense(padded)[0, len(tokens) - 1])))
        return tuple(tokens[len(prompt) :])

    return make


@pytest.mark.parametrize(
    ("page_size", "order"),
    [
        (1, "head_major"),
        (8, "token_major"),
        pytest.param(16, "head_major", marks=LONG),
    ],
)
def test_greedy_tokens_equal_those_of_a_model_without_a_cache(
    engine, dense, page_size, order
):
    made = engine(page_size=page_size, pages=512 // page_size, order=order)
    prompts = [text(seed, length) for seed, length in enumerate((1, 5, 16, 17, 40))]
    outputs = made.generate(prompts, greedy(9))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.output_ids == dense(prompt, 9)


@pytest.mark.parametrize(
    ("tp", "executor"),
    [(4, "vmap"), (8, "auto"), pytest.param(2, "auto", marks=LONG)],
)
def test_every_topology_gives_the_same_tokens(engine, dense, tp, executor):
    made = engine(tp=tp, executor=executor)
    prompts = [text(10, 23), text(11, 6)]
    for prompt, output in zip(prompts, made.generate(prompts, greedy(8)), strict=True):
        assert output.output_ids == dense(prompt, 8)


def test_a_request_does_not_depend_on_its_batch_mates(engine):
    sampling = [
        SamplingParams(
            max_tokens=12, temperature=0.9, top_k=40, seed=5, ignore_eos=True
        ),
        SamplingParams(
            max_tokens=7, temperature=1.3, top_p=0.9, seed=6, ignore_eos=True
        ),
        greedy(10),
    ]
    prompts = [text(20, 30), text(21, 3), text(22, 17)]
    together = engine().generate(prompts, sampling)
    for prompt, params, output in zip(prompts, sampling, together, strict=True):
        (alone,) = engine().generate(prompt, params)
        assert alone.output_ids == output.output_ids


def test_samples_fork_from_one_prompt_and_differ_by_their_number(engine):
    made = engine()
    params = SamplingParams(
        max_tokens=8, temperature=1.5, seed=1, n=3, ignore_eos=True, logprobs=2
    )
    (output,) = made.generate(text(30, 18), params)
    ids = [c.output_ids for c in output.completions]
    assert len(set(ids)) == 3
    assert all(len(c.logprobs) == 8 for c in output.completions)
    (first,) = engine().generate(
        text(30, 18),
        SamplingParams(max_tokens=8, temperature=1.5, seed=1, ignore_eos=True),
    )
    assert first.output_ids == ids[0]
    assert made.accounts.in_use == 0


def test_log_probabilities_belong_to_the_tokens_they_stand_beside(engine):
    (output,) = engine().generate(text(31, 9), greedy(4, logprobs=3))
    for token, probs in zip(
        output.output_ids, output.completions[0].logprobs, strict=True
    ):
        assert probs.top[0] == (token, probs.logprob)
        values = [value for _, value in probs.top]
        assert len(values) == 3 and values == sorted(values, reverse=True)


def test_a_stream_yields_what_generate_returns(engine):
    made = engine()
    (output,) = made.generate(text(32, 11), greedy(10))
    deltas = list(made.stream(text(32, 11), greedy(10)))
    assert tuple(d.token_id for d in deltas) == output.output_ids
    assert "".join(d.text for d in deltas) == output.text
    assert [d.finish_reason for d in deltas] == [None] * 9 + ["length"]


def test_two_streams_and_a_call_between_lose_no_token(engine):
    made = engine()
    prompts = [text(34, 7), text(35, 20)]
    want = [output.output_ids for output in made.generate(prompts, greedy(9))]
    streams = [made.stream(prompt, greedy(9)) for prompt in prompts]
    seen = [[], []]
    for turn in range(9):
        for at, stream in enumerate(streams):
            seen[at].append(next(stream))
        if turn == 3:
            made.generate(text(36, 5), greedy(12))
    assert [tuple(d.token_id for d in deltas) for deltas in seen] == want
    assert [deltas[-1].finish_reason for deltas in seen] == ["length"] * 2
    assert all(next(stream, None) is None for stream in streams)


def test_stop_texts_and_ids_end_a_sample_and_are_not_shown(engine):
    made = engine()
    (free,) = made.generate(text(33, 11), greedy(24))
    seen = [made.tokenizer.decode([t]) for t in free.output_ids]
    stop = seen[9] + seen[10]
    at = free.text.index(stop)
    params = greedy(24, stop=(stop,))
    (stopped,) = made.generate(text(33, 11), params)
    assert stopped.completions[0].finish_reason == "stop"
    assert stopped.text == free.text[:at]
    streamed = "".join(d.text for d in made.stream(text(33, 11), params))
    assert streamed == stopped.text
    (by_id,) = made.generate(text(33, 11), greedy(24, stop_ids=(free.output_ids[4],)))
    assert len(by_id.output_ids) <= 5


def test_a_prefix_is_computed_once(engine, dense):
    made = engine()
    stem = text(40, 21)
    made.generate([*stem, 1], greedy(2))
    (again,) = made.generate([*stem, 2, 3], greedy(6))
    assert again.cached_tokens == 20
    assert again.output_ids == dense([*stem, 2, 3], 6)


def test_without_a_prefix_cache_nothing_is_shared_or_kept(engine):
    made = engine(prefix_cache=False)
    made.generate(text(41, 21), greedy(2))
    (again,) = made.generate(text(41, 21), greedy(2))
    assert again.cached_tokens == 0
    assert made.accounts.free == made.accounts.total


def test_preempted_sequences_end_with_the_same_tokens(engine, dense):
    made = engine(pages=16)
    prompts = [text(50 + i, 14) for i in range(4)]
    outputs = made.generate(prompts, greedy(20))
    assert made.scheduler.num_preempted > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.output_ids == dense(prompt, 20)
    assert made.accounts.in_use == 0


@pytest.mark.case("BUD-08")
def test_a_request_that_can_never_fit_is_refused_and_none_of_its_batch_runs(engine):
    made = engine(pages=8, page_size=16, max_length=256, prefill_chunk=16)
    with pytest.raises(errors.OutOfPages, match="needs 13 pages .* has 8"):
        made.generate([text(60, 4), text(61, 196)], greedy(5))
    assert not made.has_work
    assert made.accounts.free == 8


def test_an_aborted_request_gives_its_pages_back(engine):
    made = engine()
    request_id = made.add(text(70, 40), greedy(50))
    for _ in range(6):
        made.step()
    assert made.accounts.in_use > 0
    assert made.abort(request_id)
    assert not made.abort(request_id)
    assert made.accounts.in_use == 0
    output = made.take_output(request_id)
    assert output.completions[0].finish_reason == "abort"
    with pytest.raises(errors.InvalidId, match="not known"):
        made.take_output(request_id)


def test_leaving_a_stream_early_aborts_its_request(engine):
    made = engine()
    stream = made.stream(text(71, 20), greedy(50))
    next(stream)
    stream.close()
    assert not made.has_work and made.accounts.in_use == 0


@pytest.mark.parametrize(
    ("prompt", "error", "phrase"),
    [
        ([], errors.ConfigError, "empty prompt"),
        ([3, 257], errors.InvalidId, r"\[257\]"),
        ([3, -1], errors.InvalidId, r"\[-1\]"),
    ],
)
def test_prompts_without_meaning_are_refused(engine, prompt, error, phrase):
    made = engine()
    with pytest.raises(error, match=phrase):
        made.add(prompt)
    assert not made.has_work


@pytest.mark.own_steps
@pytest.mark.case("JAX-01")
def test_traces_are_the_declared_buckets_while_sequences_join_and_leave(engine):
    made = engine(batches=(4,), chunks=(16,), widths=(128,))
    assert made.buckets.all() == tuple(
        made.num_traces | {b: 0 for b in made.buckets.all()}
    )
    rng = np.random.default_rng(3)
    decodes = 0
    while decodes < 200:
        while len(made.scheduler.waiting) < 2:
            length, count = int(rng.integers(1, 80)), int(rng.integers(1, 40))
            made.add(text(int(rng.integers(10**6)), length), greedy(count))
        before = len(made.scheduler.running)
        made.step()
        decodes += before > 0
    assert made.num_traces == dict.fromkeys(made.buckets.all(), 1)


@pytest.mark.own_steps
@pytest.mark.case("JAX-02")
@pytest.mark.parametrize("tp", [1, 4])
def test_warming_up_leaves_nothing_to_trace(engine, tp):
    made = engine(tp=tp, batches=(2, 4), chunks=(16,), widths=(64, 128))
    assert made.warm_up() == len(made.buckets.all())
    mesh = jax.make_mesh((tp,), ("x",), (jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        made.generate([text(80, 30), text(81, 70)], greedy(40))
    assert set(made.num_traces.values()) == {1}


@pytest.mark.case("JAX-08")
def test_an_engine_inside_a_trace_is_refused(engine):
    made = engine()
    made.add(text(90, 5), greedy(2))
    with pytest.raises(errors.ConfigError, match="inside a jax transformation"):
        jax.jit(lambda x: (made.step(), x)[1])(jnp.zeros(3))
    assert len(made.generate(text(91, 5), greedy(2))) == 1


def test_one_prompt_may_be_a_text_a_list_or_an_array(engine):
    made = engine()
    ids = [104, 101, 108, 108, 111]
    outputs = [made.generate(p, greedy(3))[0] for p in ("hello", ids, np.asarray(ids))]
    assert len({o.output_ids for o in outputs}) == 1


@pytest.mark.case("LAY-07")
@pytest.mark.parametrize("tp", [1, 4])
def test_an_engine_that_writes_elsewhere_than_it_says_does_not_start(
    engine, monkeypatch, tp
):
    engine(tp=tp, certified=True).generate(text(92, 9), greedy(2))
    write = attention.write_rows

    def swapped(pages, envelope, layer, k, v, *where):
        wrong = layer == "layers.1"
        return write(pages, envelope, layer, *((v, k) if wrong else (k, v)), *where)

    monkeypatch.setattr(attention, "write_rows", swapped)
    with pytest.raises(errors.IncompatiblePlan, match=r"layers\.1"):
        engine(tp=tp, certified=True)


def open_store(root, model, read_only=False):
    groups = geometry.group_layers(model.spec.layer_specs("float32"), 4)
    return store.PageStore.open(
        root,
        model.model_id,
        format_id(groups),
        record_nbytes=groups[0].record_nbytes,
        chunk_tokens=8,
        read_only=read_only,
    )


@pytest.mark.parametrize(
    ("tp", "page_size", "order"),
    [(1, 4, "head_major"), (2, 16, "token_major"), (8, 1, "slot_major")],
)
def test_a_text_written_at_one_topology_is_resumed_at_another(
    engine, dense, tiny_model, tmp_path, tp, page_size, order
):
    prompt = text(100, 37)
    with open_store(tmp_path, tiny_model()) as kept:
        writer = engine(tp=4, page_size=8, store=kept)
        (first,) = writer.generate(prompt, greedy(12))
        assert first.stored_tokens == 0
    longer = [*prompt, *first.output_ids]
    with open_store(tmp_path, tiny_model(), read_only=True) as kept:
        reader = engine(
            tp=tp, page_size=page_size, pages=256 // page_size, order=order, store=kept
        )
        (rest,) = reader.generate(longer, greedy(12))
    assert rest.stored_tokens == 48
    assert first.output_ids + rest.output_ids == dense(prompt, 24)
