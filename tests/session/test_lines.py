"""The log's bytes: what a cut-off write leaves is torn, anything else is damage."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmem.errors import CorruptPage, FormatMismatch
from kvmem.session import lines
from kvmem.session.identity import Identity
from kvmem.session.lines import Clock

ME = Identity("lab", "ann", "s")
SEPARATORS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


def stored(text: str, role: str = "user") -> dict:
    return {"id": f"m{text}", "role": role, "parts": [{"type": "text", "text": text}]}


def make_log(*batches: int) -> bytes:
    """Return a log of batches of so many messages."""
    data, seq = lines.header(ME, Clock()), 0
    for number, count in enumerate(batches):
        messages = [stored(f"{number}.{k}") for k in range(count)]
        data += lines.batch(seq, messages, f"k{number}", f"d{number}")
        seq += count
    return data


def test_a_log_holds_what_was_put_into_it():
    log = lines.scan(make_log(1, 3), ME)
    assert [line.seq for line in log.lines] == [0, 1, 2, 3]
    assert log.keys == {"k0": (0, 1, "d0"), "k1": (1, 4, "d1")}
    assert log.clock[:2] == (4, 4) and not log.torn


@pytest.mark.parametrize("batches", [(1,), (2, 1), (2, 3)])
def test_a_log_cut_anywhere_in_its_last_batch_is_torn_there(batches):
    whole, before = make_log(*batches), make_log(*batches[:-1])
    for end in range(len(before), len(whole)):
        log = lines.scan(whole[:end], ME)
        assert log.clock.messages == sum(batches[:-1])
        assert log.nbytes == len(before) and log.torn == whole[len(before) : end]


@pytest.mark.parametrize("batches", [(2, 1, 2), (1,), (3, 1)])
def test_one_flipped_bit_is_loud_wherever_it_is(batches):
    whole = make_log(*batches)
    for at in range(len(whole)):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[at] ^= 1 << bit
            with pytest.raises((CorruptPage, FormatMismatch)):
                lines.scan(bytes(damaged), ME)


def test_damage_names_its_line():
    data = make_log(1, 1, 1).split(b"\n")
    data[2] = data[2][:-5]
    with pytest.raises(CorruptPage, match="line 3 of the log of session 's'"):
        lines.scan(b"\n".join(data), ME)
    with pytest.raises(CorruptPage, match="line 1 "):
        lines.scan(b"", ME)


@pytest.mark.parametrize(
    "change", ["twice", "skipped", "another", "unfinished", "headed"]
)
def test_right_lines_in_a_wrong_order_are_damage(change):
    head, first, second, third, _ = make_log(1, 1, 1).split(b"\n")
    batch = make_log(1, 2).split(b"\n")[2]
    changed = {
        "twice": [head, first, first, second],
        "skipped": [head, first, third],
        "another": [head, second],
        "unfinished": [head, first, batch, third],
        "headed": [head, first, head, second],
    }[change]
    with pytest.raises(CorruptPage):
        lines.scan(b"\n".join([*changed, b""]), ME)


def test_a_hole_of_zeros_within_the_last_batch_is_torn_and_elsewhere_damage():
    before, whole = make_log(1), make_log(1, 3)
    starts = [len(before), *range(-(-len(before) // 8) * 8, len(whole) - 64, 8)]
    for start in starts:  # units of 8 bytes that were not written
        end = (start + 64) // 8 * 8
        holed = whole[:start] + bytes(end - start) + whole[end:]
        assert lines.scan(holed, ME).clock.messages == 1
    for end in range(len(before) + 1, len(whole)):  # all behind a place
        holed = whole[: end // 8 * 8].ljust(len(whole), b"\0")
        if end // 8 * 8 >= len(before):
            assert lines.scan(holed, ME).clock.messages == 1
    holed = whole[: len(before) - 20] + bytes(10) + whole[len(before) - 10 :]
    with pytest.raises(CorruptPage):
        lines.scan(holed, ME)


def test_zeros_that_are_no_whole_unit_of_a_disk_are_damage():
    before, whole = make_log(1), make_log(1, 3)
    for start in range(len(before) + 1, len(whole) - 8):
        if start % 8:
            holed = whole[:start] + b"\0" + whole[start + 1 :]
            with pytest.raises(CorruptPage, match="line 3|line 4|line 5"):
                lines.scan(holed, ME)


@pytest.mark.case("SES-29")
@settings(max_examples=60)
@given(st.lists(st.text(alphabet=st.characters(), max_size=20), min_size=1, max_size=5))
def test_any_text_is_one_line_and_comes_back(texts):
    said = [stored(text) for text in texts]
    data = lines.header(ME, Clock()) + lines.batch(0, said, SEPARATORS, "d")
    assert data.isascii() and data.count(b"\n") == len(data.splitlines())
    log = lines.scan(data, ME)
    assert [line.stored for line in log.lines] == said
    assert list(log.keys) == [SEPARATORS]


def test_a_log_read_on_is_the_log_read_whole():
    whole = make_log(2, 3, 1)
    for batches in [(), (2,), (2, 3)]:
        known = lines.scan(make_log(*batches), ME)
        assert lines.extend(known, whole, ME) == lines.scan(whole, ME)


def test_a_log_of_another_version_or_session_is_refused():
    with pytest.raises(FormatMismatch, match="'s', not 't'"):
        lines.scan(make_log(1), ME._replace(session="t"))
    head = {"format": lines.FORMAT, "version": 2} | ME._asdict() | {"first": 0}
    with pytest.raises(FormatMismatch, match="version 1"):
        lines.scan(lines.seal(head | {"turns": 0, "tokens": 0}), ME)


def test_the_clock_counts_messages_turns_and_tokens():
    said = [stored("x" * 8), stored("y" * 4, "assistant"), stored("会議")]
    assert lines.advance(Clock(5, 2, 10), said) == (8, 4, 10 + 2 + 1 + 3)
