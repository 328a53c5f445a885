"""What runs is said, with the reason; what cannot run is refused in words."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.limits import Unsupported

IDS = np.array([1, -1], np.int32)


def test_arrays_of_numpy_are_copied_on_the_host(prove):
    pages = prove.bytes(3, 48)
    choice = dispatch.choose("gather_pages", pages, IDS)
    assert choice.implementation == "host" and "numpy" in choice.reason
    rows = dispatch.run("gather_pages", pages, IDS)
    assert isinstance(rows, np.ndarray)
    np.testing.assert_array_equal(rows[0], pages[1])


def test_arrays_of_jax_on_a_cpu_take_the_program_of_xla(prove):
    pages = jnp.asarray(prove.bytes(3, 48))
    choice = dispatch.choose("zero_pages", pages, jnp.asarray(IDS))
    assert choice.implementation == "reference"
    assert "need a CUDA device, these arrays are on cpu" in choice.reason
    cleared = dispatch.run("zero_pages", pages, jnp.asarray(IDS))
    assert pages.is_deleted() and not np.asarray(cleared)[1].any()


def test_a_kernel_that_cannot_run_here_is_an_error_that_names_what_can(prove):
    pages = jnp.asarray(prove.bytes(3, 48))
    with pytest.raises(Unsupported, match="CUDA device.*Use reference, or auto"):
        dispatch.run("zero_pages", pages, IDS, implementation="mosaic_gpu")
    with pytest.raises(Unsupported, match="not of numpy"):
        dispatch.run("zero_pages", pages, IDS, implementation="host")


def test_on_a_gpu_a_kernel_is_chosen_once_a_device_has_seen_it(prove, monkeypatch):
    shapes = prove.shape("uint8", 3, 48), prove.shape("int32", 2)
    before = dispatch.choose("gather_pages", *shapes, platform="gpu")
    assert before.implementation == "reference"
    assert "none has checked and timed it yet" in before.reason
    monkeypatch.setattr(dispatch, "SEEN_ON_A_DEVICE", frozenset({"gather_pages"}))
    after = dispatch.choose("gather_pages", *shapes, platform="gpu")
    assert after.implementation == "mosaic_gpu"
    asked = dispatch.choose(
        "zero_pages", *shapes, implementation="mosaic_gpu", platform="gpu"
    )
    assert asked == dispatch.Choice("zero_pages", "mosaic_gpu", "asked for")


def test_a_width_that_no_copy_serves_goes_to_xla_with_the_number(prove):
    shapes = prove.shape("uint8", 3, 1_284), prove.shape("int32", 2)
    choice = dispatch.choose("gather_pages", *shapes, platform="gpu")
    assert choice.implementation == "reference" and "1,284 B" in choice.reason
    with pytest.raises(Unsupported, match="1,284 B"):
        dispatch.choose(
            "gather_pages", *shapes, implementation="mosaic_gpu", platform="gpu"
        )


@pytest.mark.parametrize(
    ("operation", "implementation"), [("gather", "auto"), ("zero_pages", "triton")]
)
def test_unknown_words_are_refused_with_the_known_ones(operation, implementation):
    with pytest.raises(Unsupported, match="gather_pages, .*auto, reference, host"):
        dispatch.choose(operation, implementation=implementation)


def test_every_operation_is_listed_with_a_reason():
    for platform in ("cpu", "gpu"):
        listed = dispatch.choices(platform)
        assert set(dispatch.OPERATIONS) <= {choice.operation for choice in listed}
        assert all(choice.reason for choice in listed)


def test_under_jit_the_platform_is_where_jax_compiles():
    seen = []

    def traced(pages, ids):
        seen.append(dispatch.choose("gather_pages", pages, ids))
        return pages

    jax.jit(traced)(jnp.zeros((2, 48), jnp.uint8), IDS)
    assert seen[0].implementation == "reference" and "on cpu" in seen[0].reason


@pytest.mark.parametrize("implementation", ["auto", "host", "reference"])
@pytest.mark.parametrize("num_pages", [4, -1])
def test_more_pages_than_the_pools_array_has_are_refused(
    prove, implementation, num_pages
):
    """Ids up to them would be let in, and a read would give the last page's bytes."""
    pages, ids = prove.bytes(3, 48), np.array([3], np.int32)
    facts = {"implementation": implementation, "num_pages": num_pages}
    with pytest.raises(Unsupported, match="in an array of 3"):
        dispatch.run("gather_pages", pages, ids, **facts)
    table, into = np.zeros((1, 2), np.int32), prove.bytes(9, 16)
    with pytest.raises(Unsupported, match="in an array of 3"):
        dispatch.choose("export_records", into, pages, ids, table, np.int32(0), **facts)
