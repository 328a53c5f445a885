import numpy as np
import pytest

from kvmem.geometry import Rope
from kvmem.model.rotate import angles, rotate


def turned(rows, positions, rope):
    cos, sin = angles(rope, rows.shape[-1], positions)
    return np.asarray(rotate(rows, cos, sin, rope))


@pytest.fixture
def rows():
    return np.random.default_rng(3).standard_normal((2, 5, 3, 8)).astype(np.float32)


@pytest.fixture
def positions():
    return np.array([[0, 1, 2, 3, 4], [90, 91, 92, 93, 700]], np.int32)


def test_half_rotation_is_a_complex_product_of_dim_i_and_dim_i_plus_half(
    rows, positions
):
    pairs = rows[..., :4] + 1j * rows[..., 4:]
    turn = positions[..., None, None] * 100.0 ** (-np.arange(4) / 4)
    expected = pairs * np.exp(1j * turn)
    got = turned(rows, positions, Rope(theta=100.0))
    np.testing.assert_allclose(got[..., :4], expected.real, atol=2e-4)
    np.testing.assert_allclose(got[..., 4:], expected.imag, atol=2e-4)


def test_interleaved_rotation_pairs_neighbours(rows, positions):
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    half = turned(rows[..., order], positions, Rope(theta=100.0))
    got = turned(rows, positions, Rope(theta=100.0, style="interleaved"))
    np.testing.assert_allclose(got[..., order], half, atol=1e-6)


def test_dims_outside_the_window_stay_as_they_are(rows, positions):
    rope = Rope(theta=100.0, offset=2, width=4)
    got = turned(rows, positions, rope)
    np.testing.assert_array_equal(got[..., :2], rows[..., :2])
    np.testing.assert_array_equal(got[..., 6:], rows[..., 6:])
    inner = turned(np.ascontiguousarray(rows[..., 2:6]), positions, Rope(theta=100.0))
    np.testing.assert_allclose(got[..., 2:6], inner, atol=1e-6)


def test_magnitude_scales_the_rotated_window(rows, positions):
    plain = turned(rows, positions, Rope())
    np.testing.assert_allclose(
        turned(rows, positions, Rope(magnitude=1.5)), 1.5 * plain, rtol=1e-5, atol=1e-6
    )


def test_a_score_depends_on_the_distance_alone(rows):
    q, k = rows[:1, :1], rows[1:, 1:2]
    rope = Rope(theta=100.0)

    def score(q_at, k_at):
        at = [np.array([[place]], np.int32) for place in (q_at, k_at)]
        return (turned(q, at[0], rope) * turned(k, at[1], rope)).sum()

    assert score(5, 2) == pytest.approx(score(45, 42), abs=1e-4)
    assert score(5, 2) != pytest.approx(score(5, 3), abs=1e-2)
