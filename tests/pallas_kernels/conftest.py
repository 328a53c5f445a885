"""The three proofs of a kernel that need no GPU, as one builder: `prove`."""

import jax
import numpy as np
import pytest

from pallas_kernels import interpret, limits, lists, ring


class Prover:
    """Runs a kernel's body on the host and lowers it for CUDA."""

    def __init__(self):
        self.rng = np.random.default_rng(20_611)

    def bytes(self, *shape: int) -> np.ndarray:
        """Return aperiodic bytes."""
        return self.rng.integers(0, 256, shape, dtype=np.uint8)

    def equal(self, op, arrays, *, tuning=None, **facts) -> np.ndarray:
        """Assert kernel = reference = host, byte for byte; return the result."""
        assert op.supports(*arrays, **facts) is None
        found = interpret.run(op.kernel, *arrays, **facts, **(tuning or {}))
        expected = jax.jit(lambda *a: op.reference(*a, **facts))(*arrays)
        np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))
        own = [np.array(array) for array in arrays]
        np.testing.assert_array_equal(op.host(*own, **facts), np.asarray(expected))
        return np.asarray(found)

    def lowers(self, op, shapes, **facts) -> str:
        """Lower for CUDA; return the program's text, which names its kernels."""
        assert op.supports(*shapes, **facts) is None
        traced = jax.jit(lambda *a: op.kernel(*a, **facts)).trace(*shapes)
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    @staticmethod
    def shape(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
        """Return an array's shape without the array."""
        return jax.ShapeDtypeStruct(shape, dtype)

    params = staticmethod(interpret.params)
    reset = staticmethod(interpret.reset)

    def unguarded_differs(self, op, monkeypatch, *arrays, **facts) -> bool:
        """Answer whether a kernel that lets every id pass its guard is found out."""
        right = jax.jit(lambda *a: op.reference(*a, **facts))(*arrays)
        monkeypatch.setattr(ring, "guarded", lambda page, num_pages: page == page)
        # The list is settled in jax before the body: let its bounds be the array's.
        monkeypatch.setattr(lists, "settle", lambda ids, num_pages: ids)
        monkeypatch.setattr(lists, "inside", lambda ids, num_pages: ids == ids)
        wrong = jax.jit(lambda *a: op.kernel(*a, **facts, interpret=interpret.params()))
        try:
            found = np.asarray(wrong(*arrays))
        except Exception:
            interpret.reset()
            return True
        return bool((found != np.asarray(right)).any())


@pytest.fixture
def prove() -> Prover:
    """Proofs of one kernel, with bytes of their own."""
    return Prover()


@pytest.fixture
def race() -> type[Exception]:
    """The error of a body with a race."""
    return interpret.Race


@pytest.fixture
def odd_width() -> int:
    """A page of several copies, each a multiple of 16 but of no power of two."""
    width = 48 * 17
    assert limits.misaligned(page=width) is None
    return width
