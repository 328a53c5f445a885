"""Buckets: few shapes, every length has one, and the smallest that fits is taken."""

import pytest

from kvmem import errors
from kvmem.geometry import Lifecycle, LifecycleGroup
from kvmem.geometry.lifecycle import FULL, STATE
from kvmem.serve.buckets import Bucket, ServeConfig, declare


def test_defaults_grow_by_a_half_and_a_third_and_chunks_by_halves():
    buckets = declare(ServeConfig(max_batch=8, max_length=1000), page_size=16)
    assert buckets.batches == (1, 4, 8)
    assert buckets.chunks == (32, 64, 128, 256)
    assert [p * 16 for p in buckets.pages] == [128, 192, 256, 384, 512, 768, 1024]


@pytest.mark.parametrize("page_size", [1, 7, 16, 64])
def test_every_length_has_the_smallest_bucket_that_holds_it(page_size):
    config = ServeConfig(max_batch=3, max_length=300, prefill_chunk=20)
    buckets = declare(config, page_size)
    for length in range(1, 301):
        bucket = buckets.decode(2, length)
        assert bucket.rows == 3 and bucket.tokens == 1
        assert bucket.pages * page_size >= length
        smaller = [p for p in buckets.pages if p < bucket.pages]
        assert all(p * page_size < length for p in smaller)
        assert bucket in buckets.all()
        assert buckets.prefill(min(length, 20), length) in buckets.all()


def test_declared_sizes_are_taken_as_they_are():
    config = ServeConfig(
        max_batch=4,
        max_length=64,
        prefill_chunk=8,
        batches=(4,),
        chunks=(8,),
        widths=(64,),
    )
    buckets = declare(config, 16)
    assert buckets.all() == (Bucket(4, 1, 4), Bucket(1, 8, 4))


@pytest.mark.parametrize(
    "changes", [{"prefill_chunk": 1}, {"prefill_chunk": 8, "chunks": (1, 8)}]
)
def test_a_chunk_of_one_token_is_a_declared_bucket(changes):
    config = ServeConfig(max_batch=4, max_length=64, batches=(4,), **changes)
    buckets = declare(config, 16)
    declared = buckets.all()
    assert len(declared) == len(set(declared))
    for tokens in range(1, config.prefill_chunk + 1):
        for length in range(tokens, 65):
            assert buckets.prefill(tokens, length) in declared
            assert buckets.decode(2, length) in declared


@pytest.mark.parametrize(
    ("values", "law"),
    [
        ({"max_batch": 0}, "max_batch >= 1"),
        ({"batches": (1, 4)}, "max(batches) == max_batch"),
        ({"chunks": (8,)}, "max(chunks) == prefill_chunk"),
        ({"widths": (64,)}, "max(widths) >= max_length"),
        ({"batches": (0, 8)}, "every bucket >= 1"),
        ({"max_batch": 2.5}, "max_batch: 2.5 is float, not an integer"),
        ({"prefill_chunk": 4.0}, "prefill_chunk: 4.0 is float, not an integer"),
        ({"batches": (1.5, 8)}, "batches: 1.5 is float, not an integer"),
        ({"max_length": True}, "max_length: True is bool, not int"),
    ],
)
def test_sizes_that_leave_a_length_without_a_bucket_are_refused(values, law):
    with pytest.raises(errors.ConfigError) as refused:
        ServeConfig(**values)
    assert law in str(refused.value)


@pytest.mark.parametrize(
    ("life", "decode", "prefill"),
    [
        (FULL, 64, 64),
        (Lifecycle("window", 128), 9, 25),  # a step reads what a window holds
        (Lifecycle("window", 128, 20), 11, 27),
        (Lifecycle("window", 2_000), 64, 64),
        (STATE, 1, 1),
    ],
)
def test_a_groups_table_is_as_wide_as_what_it_holds_at_most(life, decode, prefill):
    group = LifecycleGroup("a test's", "target", life, (), page_size=16)
    assert Bucket(8, 1, 64).width(group) == decode
    assert Bucket(1, 256, 64).width(group) == prefill
