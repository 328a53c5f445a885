"""Between pages and the store: what is fetched is verified, what is kept is whole."""

import numpy as np
import pytest

from kvmem import errors, geometry, store
from kvmem.canonical import format_id
from kvmem.serve.request import SamplingParams


def text(seed, length):
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def greedy(count):
    return SamplingParams(max_tokens=count, ignore_eos=True)


@pytest.fixture
def open_store(tmp_path, tiny_model):
    """Stores of the tiny model on one root, in chunks of 8 tokens."""

    def make(kv_dtype="float32", **options):
        model = tiny_model()
        groups = geometry.group_layers(model.spec.layer_specs(kv_dtype), 4)
        return store.PageStore.open(
            tmp_path / "root",
            model.model_id,
            format_id(groups),
            record_nbytes=groups[0].record_nbytes,
            chunk_tokens=8,
            **options,
        )

    return make


def test_a_finished_request_leaves_its_whole_chunks(engine, open_store):
    with open_store() as kept:
        made = engine(store=kept)
        made.generate(text(0, 21), greedy(6))
        # 27 tokens, of which the last was never fed: 26 computed, 3 chunks of 8
        assert kept.stats().written == 3
        made.generate(text(0, 21), greedy(6))
        assert kept.stats().written == 3


@pytest.mark.parametrize("length", [1, 8, 9, 16, 17, 40])
def test_at_least_one_token_is_left_to_compute(engine, open_store, length):
    prompt = text(1, length)
    with open_store() as kept:
        made = engine(store=kept, prefix_cache=False)
        (first,) = made.generate(prompt, greedy(9))
        (again,) = made.generate(prompt, greedy(9))
        assert again.output_ids == first.output_ids
        assert again.stored_tokens == (length - 1) // 8 * 8


def test_pages_of_this_process_come_before_the_store(engine, open_store):
    with open_store() as kept:
        made = engine(store=kept, page_size=16)
        made.generate(text(2, 30), greedy(4))
        (again,) = made.generate(text(2, 30), greedy(4))
        # one whole page of 16 is cached; the store has the chunk behind it
        assert (again.cached_tokens, again.stored_tokens) == (16, 8)


def test_a_damaged_chunk_is_computed_again_and_kept_anew(engine, open_store, tmp_path):
    prompt = text(3, 40)
    with open_store() as kept:
        (first,) = engine(store=kept).generate(prompt, greedy(4))
    payload = [p for p in tmp_path.rglob("*") if p.is_file() and "orbax" in p.parts]
    largest = max(payload, key=lambda path: path.stat().st_size)
    spoiled = bytearray(largest.read_bytes())
    spoiled[len(spoiled) // 2] ^= 4
    largest.write_bytes(spoiled)
    with open_store() as kept:
        made = engine(store=kept, prefix_cache=False)
        (again,) = made.generate(prompt, greedy(4))
        assert again.stored_tokens < 32
        assert again.output_ids == first.output_ids
        assert kept.stats().misses == {"checksum": 1}
        (healed,) = made.generate(prompt, greedy(4))
        assert healed.stored_tokens == 32
        assert healed.output_ids == first.output_ids


def test_a_store_that_cannot_keep_says_so_and_no_answer_is_lost(
    engine, open_store, monkeypatch
):
    prompts = [text(4, 20), text(40, 11)]
    want = [output.output_ids for output in engine().generate(prompts, greedy(3))]
    with open_store() as kept:
        made = engine(store=kept)
        put, calls = kept.put, []

        def full_at_first(*arguments, **more):
            calls.append(arguments)
            if len(calls) == 1:
                raise OSError(28, "No space left on device")
            return put(*arguments, **more)

        monkeypatch.setattr(kept, "put", full_at_first)
        with pytest.raises(errors.NotKept, match="1 of 2 .*No space left") as raised:
            made.generate(prompts, greedy(3))
        assert [output.output_ids for output in raised.value.outputs] == want
        assert made.accounts.in_use == 0 and not made.has_work
        (again,) = made.generate(prompts[0], greedy(3))
        assert again.store_error is None and again.output_ids == want[0]


def test_a_stream_shows_every_token_before_it_says_what_was_not_kept(
    engine, open_store, monkeypatch
):
    with open_store() as kept:
        made, seen = engine(store=kept), []

        def full(*_, **__):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(kept, "put", full)
        with pytest.raises(errors.NotKept):
            for delta in made.stream(text(41, 20), greedy(4)):
                seen.append(delta)
        assert [d.finish_reason for d in seen] == [None] * 3 + ["length"]


def test_closing_an_engine_lets_another_writer_in(engine, open_store):
    with engine(store=open_store()) as made:
        made.generate(text(42, 20), greedy(2))
        with pytest.raises(errors.StoreLocked):
            open_store()
    with open_store() as kept:
        assert kept.stats().num_chunks > 0


def test_records_of_a_going_request_are_the_same_bytes_on_every_topology(engine):
    prompt, records = text(5, 20), []
    for tp, page_size, order in ((1, 4, "head_major"), (2, 16, "packed_nhd")):
        made = engine(tp=tp, page_size=page_size, order=order)
        request_id = made.add(prompt, greedy(4))
        while not made.scheduler.running or made.scheduler.running[0].num_left > 1:
            made.step()
        records.append(made.records(request_id)[:20].view(np.float32))
        made.abort(request_id)
        with pytest.raises(errors.InvalidId, match="only a request that is going"):
            made.records(request_id)
    assert records[0].shape == (20, 2 * 4 * 2 * 8)
    np.testing.assert_allclose(records[0], records[1], rtol=1e-4, atol=1e-5)


def test_another_cache_dtype_shares_no_hit(engine, open_store):
    prompt = text(6, 40)
    with open_store() as kept:
        engine(store=kept).generate(prompt, greedy(2))
    with open_store("bfloat16") as kept:
        made = engine(store=kept, kv_dtype="bfloat16")
        assert made.generate(prompt, greedy(2))[0].stored_tokens == 0
        again = engine(store=kept, kv_dtype="bfloat16").generate(prompt, greedy(2))
        assert again[0].stored_tokens == 32
