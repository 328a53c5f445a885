"""Records turned on their way into pages: one pass, the bytes of two."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import import_records, import_turned, interpret, rerope, rotation
from pallas_kernels.records import Layout
from pallas_kernels.walk import Walk

NUM_PAGES = 4
IDS = np.array([3, 9, 0, -1], np.int32)
SLOTS = 32  # two tiles of 16
STYLES = {"half": 16, "interleaved": 8}  # and pairs
LONG = pytest.mark.long  # `make test-kernels` runs these too, on both jax


class Case:
    """Keys of two runs in each record, with a window behind other bytes of a run."""

    def __init__(self, prove, style: str, dtype: str = "bfloat16", record=None):
        pairs = STYLES[style]
        window = rotation.Window(style, dtype, pairs)
        self.offset, run = 32, 32 + window.nbytes
        record = 2 * run if record is None else record
        tokens = len(IDS) * SLOTS - 5
        keys = prove.rng.standard_normal((tokens, record // 2)).astype(jnp.bfloat16)
        self.rows = keys.view(np.uint8).reshape(tokens, record).copy()
        self.pages = prove.bytes(NUM_PAGES + 2, 2 * SLOTS * run)
        self.table = np.array([[0, record - 2 * run], [SLOTS * run, record - run]])
        self.table = self.table.astype(np.int32)
        deltas = prove.rng.integers(-(10**5), 10**5, (len(IDS), SLOTS))
        deltas[:, ::7] = 0
        frequencies = 10_000.0 ** (-np.arange(pairs) / pairs)
        self.cos, self.sin = rotation.tables(deltas, frequencies)
        self.run, self.window = run, window
        self.layout = Layout(run, run, SLOTS)

    @property
    def plain(self):
        """Arrays of import_records."""
        return self.pages, IDS, self.table, self.rows, np.int32(3)

    @property
    def arrays(self):
        return *self.plain, self.cos, self.sin

    @property
    def sizes(self):
        return {"layout": self.layout, "num_pages": NUM_PAGES}

    @property
    def facts(self):
        window = {"style": self.window.style, "dtype": self.window.dtype}
        return self.sizes | window | {"window_offset": self.offset}


@pytest.mark.parametrize(
    ("style", "dtype"),
    [("half", "bfloat16"), pytest.param("interleaved", "float16", marks=LONG)],
)
def test_records_come_in_turned_to_the_last_bit(prove, style, dtype):
    case = Case(prove, style, dtype)
    prove.equal(
        import_turned, case.arrays, tuning={"blocks": 2, "stages": 2}, **case.facts
    )


@pytest.mark.parametrize("style", ["interleaved", pytest.param("half", marks=LONG)])
def test_an_import_that_turns_is_an_import_and_a_rotation(prove, style):
    """Of the slots that have a token: others keep what they held, unturned."""
    case = Case(prove, style)
    found = jax.jit(lambda *a: import_turned.reference(*a, **case.facts))(*case.arrays)
    pages = import_records.host(case.pages.copy(), *case.plain[1:], **case.sizes)
    offsets = case.table[:, 0] + np.int32(case.offset)
    turned = rerope.host(
        pages.copy(),
        IDS,
        offsets,
        case.cos,
        case.sin,
        style=style,
        dtype="bfloat16",
        slot_stride=case.run,
        num_pages=NUM_PAGES,
    )
    expected = pages.copy().reshape(NUM_PAGES + 2, 2, SLOTS, case.run)
    imported = np.ones((len(IDS), SLOTS), bool)
    imported[0, :3] = imported[3, -2:] = False  # before the first token, and behind
    for entry, page in enumerate(IDS):
        if 0 <= page < NUM_PAGES:
            own = turned.reshape(expected.shape)[page][:, imported[entry]]
            expected[page][:, imported[entry]] = own
    np.testing.assert_array_equal(np.asarray(found), expected.reshape(found.shape))
    assert not np.array_equal(expected.reshape(found.shape), pages)


def test_no_page_no_run_and_no_record_change_nothing(prove):
    case = Case(prove, "half")
    pages, ids, table, rows, first, cos, sin = case.arrays
    for arrays in (
        (pages, ids[:0], table, rows, first, cos[:0], sin[:0]),
        (pages, ids, table[:0], rows, first, cos, sin),
        (pages, ids, table, rows[:0], first, cos, sin),
    ):
        kept = prove.equal(import_turned, arrays, **case.facts)
        np.testing.assert_array_equal(kept, pages)


@LONG
def test_records_of_words_turn_too(prove):
    case = Case(prove, "interleaved", record=132)
    case.layout = Layout(case.run, case.run, SLOTS)
    assert case.layout.tiles(132, (case.window.columns,)).by_words
    prove.equal(import_turned, case.arrays, tuning={"blocks": 2}, **case.facts)


def test_keys_of_32_bits_agree_to_two_ulps(prove):
    case = Case(prove, "half", "float32", record=2 * (32 + 128))
    floats = prove.rng.standard_normal((len(case.rows), case.rows.shape[1] // 4))
    case.rows = floats.astype(np.float32).view(np.uint8)
    found = interpret.run(import_turned.kernel, *case.arrays, **case.facts)
    expected = import_turned.host(case.pages.copy(), *case.arrays[1:], **case.facts)
    found, expected = (np.asarray(pages)[[0, 3]] for pages in (found, expected))
    differ = (found != expected).reshape(2, 2, SLOTS, case.run)
    assert not differ[..., : case.offset].any()
    kept = [pages[:, :].reshape(2, 2, SLOTS, case.run)[:, :, 3:-2, case.offset :]
            for pages in (found, expected)]  # fmt: skip
    found, expected = (np.ascontiguousarray(part).view(np.float32) for part in kept)
    scale = np.abs(floats).max()
    assert (np.abs(found - expected) <= 2 * np.spacing(np.float32(scale))).all()


@pytest.mark.parametrize("style", ["half", pytest.param("interleaved", marks=LONG)])
def test_a_distance_of_nought_is_a_plain_import_whatever_the_bits(prove, style):
    case = Case(prove, style)
    case.rows[...] = 0xFF  # NaN
    case.cos, case.sin = np.ones_like(case.cos), np.zeros_like(case.sin)
    found = prove.equal(import_turned, case.arrays, **case.facts)
    plain = import_records.host(case.pages.copy(), *case.plain[1:], **case.sizes)
    np.testing.assert_array_equal(found, plain)


def test_tables_that_stay_from_tile_to_tile_are_caught(prove, monkeypatch):
    case = Case(prove, "half")
    right = jax.jit(lambda *a: import_turned.reference(*a, **case.facts))(*case.arrays)
    monkeypatch.setattr(Walk, "is_new_tile", lambda walk, k: k == 0)
    wrong = interpret.run(import_turned.kernel, *case.arrays, blocks=1, **case.facts)
    assert (np.asarray(wrong) != np.asarray(right)).any()


def test_a_tile_that_is_stored_while_it_turns_is_a_race(prove, monkeypatch, race):
    case = Case(prove, "half")
    monkeypatch.setattr(import_turned.plgpu, "commit_smem", lambda: None)
    with pytest.raises(race):
        interpret.run(import_turned.kernel, *case.arrays, blocks=1, **case.facts)


def test_an_import_that_turns_without_its_guard_is_caught(prove, monkeypatch):
    case = Case(prove, "half")
    pages, _, table, rows, first, cos, sin = case.arrays
    ids = np.array([5], np.int32)
    arrays = pages, ids, table, rows[:16], first, cos[:1], sin[:1]
    assert prove.unguarded_differs(import_turned, monkeypatch, *arrays, **case.facts)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"style": "spiral"}, "style 'spiral'"),
        ({"window_offset": 34}, "registers move words of 4 B"),
        ({"window_offset": 36}, "a window of 64 B from byte 36 of a run of 96 B"),
        ({"layout": Layout(96, 96, 16)}, "cosines of 4 x 32 slots"),
        ({"layout": Layout(96, 98, SLOTS)}, "slot stride of 98 B"),
    ],
)
def test_what_no_kernel_turns_on_its_way_is_refused(prove, changes, words):
    case = Case(prove, "half")
    assert words in import_turned.supports(*case.arrays, **case.facts | changes)


def test_it_lowers_for_cuda_under_its_own_name(prove):
    case = Case(prove, "interleaved")
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in case.arrays]
    assert "import_turned" in prove.lowers(import_turned, shapes, **case.facts)
