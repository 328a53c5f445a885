import numpy as np
import pytest

from kvmem import geometry
from kvmem.geometry import Rope
from kvmem.model.rotate import angles, by_delta, rotate


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


SCALED = [
    Rope(500_000.0),
    Rope(100.0, style="interleaved", offset=2, width=4),
    geometry.rope.llama3(500_000.0, 8, 8.0, 1.0, 4.0, 8192),
    geometry.rope.yarn(10_000.0, 8, 32.0, 4096),
    geometry.rope.linear(10_000.0, 8, 4.0),
]


@pytest.mark.parametrize("rope", SCALED)
def test_a_turn_by_a_distance_is_the_hosts_to_a_millionth(rope):
    rows = np.random.default_rng(5).standard_normal((64, 3, 8)).astype(np.float32)
    delta = np.random.default_rng(6).integers(-(1 << 30), 1 << 30, 64)
    delta[:3] = 0, 1, -1
    rows[0, 0] = np.inf  # kept, where a turn by nothing would make NaN of it
    found = np.asarray(by_delta(rows, rope, delta.astype(np.int32)))
    with np.errstate(invalid="ignore"):
        want = geometry.rerotate.by_delta(rows, rope, delta)
    np.testing.assert_allclose(found, want, atol=2e-6)
    assert found[0].tobytes() == rows[0].tobytes()


def test_one_distance_serves_all_rows_and_dtypes_stay():
    rows = np.random.default_rng(7).standard_normal((4, 8)).astype(np.float32)
    for dtype in ("bfloat16", "float16", "float8_e4m3fn"):
        held = rows.astype(geometry.np_dtype(dtype))
        found = by_delta(held, Rope(100.0), 7)
        assert found.dtype == held.dtype
        want = geometry.rerotate.by_delta(held, Rope(100.0), 7)
        assert np.array_equal(np.asarray(found).view(np.uint8), want.view(np.uint8))


def test_a_turned_fp8_key_saturates():
    held = np.full((1, 2), 448, geometry.np_dtype("float8_e4m3fn"))
    found = np.asarray(by_delta(held, Rope(frequencies=(np.pi / 4,)), 1))
    assert found.astype(np.float32).tolist()[0][1] == 448.0


def test_no_rows_turn_to_none():
    none = by_delta(np.zeros((0, 3, 8), np.float32), Rope(100.0), np.zeros(0, int))
    assert none.shape == (0, 3, 8)
