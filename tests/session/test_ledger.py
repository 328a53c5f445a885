"""The ledger's file: what is right in it counts, what is not is left out."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmem.errors import FormatMismatch
from kvmem.session import ledger, ledger_file
from kvmem.session.identity import Identity
from kvmem.session.ledger import Ledger, Record, Request

ME = Identity("lab", "ann", "s")
uris = st.text(min_size=1, max_size=8)
records = st.builds(
    Record,
    turn=st.integers(0, 99),
    detail=st.sampled_from(ledger.DETAILS),
    unit=st.none() | st.sampled_from(["messages", "turns"]),
    n=st.none() | st.integers(0, 9),
    turns=st.none() | st.integers(0, 9),
    tokens=st.none() | st.integers(0, 9),
    idle=st.integers(0, 3),
)
actors = st.none() | st.sampled_from(["planner", "критик"])


@given(st.dictionaries(actors, st.dictionaries(uris, records, min_size=1)))
def test_a_ledger_comes_back_as_it_was_written(held):
    entry = {"uri": "M", "tier": "full", "text": "t", "score": 1.0, "peer": None}
    request = Request("planner", "d", 3, (entry,), {"M": {"turn": 3}}, True)
    before = Ledger(held, {"r": request}, 7, 4, 2)
    assert ledger_file.parse(ledger_file.dump(before, ME), ME).ledger == before


@pytest.mark.parametrize(
    "fields",
    [
        None,
        7,
        "x",
        [],
        {},
        {"turn": "y"},
        {"turn": -1},
        {"turn": True},
        {"turn": 1.5},
        {"turn": 1, "detail": "whole"},
        {"turn": 1, "n": "3"},
        {"turn": 1, "unit": 3},
        {"turn": 1, "tokens": -2},
    ],
)
def test_a_bad_record_is_left_out_and_the_others_count(fields):
    for place in ({"entries": {"bad": fields, "good": {"turn": 1}}},):
        data = json.dumps({"version": 1} | place).encode()
        assert list(ledger_file.parse(data, ME).ledger.of(None)) == ["good"]
    data = {"version": 1, "actors": {"p": {"bad": fields, "good": {"turn": 1}}}}
    assert list(ledger_file.parse(json.dumps(data).encode(), ME).ledger.of("p")) == [
        "good"
    ]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b'{"version":3}',
        b'{"version":1,"entries":3}',
        b'{"version":1,"actors":[1]}',
        b'{"version":1,"entries":{},"idle":3}',
        b'{"version":1,"user":"bob"}',
        b"\xff\xfe",
    ],
)
def test_a_file_that_is_no_ledger_of_this_session_is_said_to_be(data):
    with pytest.raises(FormatMismatch):
        ledger_file.parse(data, ME)


def test_a_bad_request_is_left_out():
    requests = {"a": 3, "b": {"actor": None}, "c": {"entries": [{}]}}
    data = json.dumps({"version": 1, "requests": requests}).encode()
    assert ledger_file.parse(data, ME).ledger.requests == {}


def test_the_newest_five_hundred_records_of_an_actor_are_kept():
    many = {f"u{i}": Record(i % 7) for i in range(600)}
    kept = ledger.capped(Ledger({None: many, "p": many}), None, many)
    assert len(kept.of(None)) == 500 and len(kept.of("p")) == 600
    oldest = [u for u, r in many.items() if r.turn == 0]
    assert not set(oldest) & set(kept.of(None))
