"""A manifest says a chain or counts as none, whatever its bytes are."""

import dataclasses
import hashlib
import json

import pytest

from kvmem.conversation.chain import Chain, Facts, Span
from kvmem.errors import CorruptPage, FormatMismatch

CHAIN = Chain(
    Facts("model", "format", 16, "tag"),
    tuple(range(50)),
    49,
    (Span(0, 0, 40), Span(0, 20, 30, "memories/tea"), Span(1, 40, 50)),
)


def sealed(fields) -> bytes:
    """Return a manifest of any fields, with the digest that belongs to it."""
    body = json.dumps(fields).encode()
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def fields(**changed) -> dict:
    return {"version": 1, **dataclasses.asdict(CHAIN), **changed}


def test_a_manifest_comes_back_as_it_was():
    assert Chain.decode(CHAIN.encode()) == CHAIN
    assert Chain.decode(sealed(fields())) == CHAIN


@pytest.mark.parametrize("at", [0, 30, 64, 65, 200, -1])
def test_a_flipped_bit_is_seen(at):
    data = bytearray(CHAIN.encode())
    data[at] ^= 4
    with pytest.raises(CorruptPage):
        Chain.decode(bytes(data))


@pytest.mark.parametrize("length", [0, 1, 64, 65, 100, -1])
def test_a_manifest_that_ends_early_is_seen(length):
    with pytest.raises(CorruptPage):
        Chain.decode(CHAIN.encode()[:length])


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        "chain",
        None,
        {},
        {"version": 1},
        fields(facts=None),
        fields(facts=["model", "format", 16]),
        fields(facts=["model", "format", 0, "tag"]),
        fields(facts=["model", "format", "16", "tag"]),
        fields(facts=["model", 7, 16, "tag"]),
        fields(tokens="0123"),
        fields(tokens=None),
        fields(tokens=[0, "1"]),
        fields(tokens=[0, 1.0]),
        fields(tokens=[-1], num_rows=1),
        fields(tokens=[2**40], num_rows=1),
        fields(num_rows=51),
        fields(num_rows=-1),
        fields(num_rows=True),
        fields(spans=7),
        fields(spans=[[0, 0]]),
        fields(spans=[[0, 0, 51, None]]),
        fields(spans=[[0, 30, 20, None]]),
        fields(spans=[[-2, 0, 20, None]]),
        fields(spans=[["0", 0, 20, None]]),
        fields(spans=[[0, 0, 20, 7]]),
    ],
)
def test_what_says_no_chain_counts_as_none(wrong):
    with pytest.raises(CorruptPage, match="counts as no chain"):
        Chain.decode(sealed(wrong))


@pytest.mark.parametrize("version", [2, "1", None])
def test_another_version_counts_as_none(version):
    with pytest.raises(FormatMismatch, match="version"):
        Chain.decode(sealed(fields(version=version)))


def test_a_manifest_nested_without_end_counts_as_none():
    body = b"[" * 100_000
    blob = hashlib.sha256(body).hexdigest().encode() + b"\n" + body
    with pytest.raises(CorruptPage):
        Chain.decode(blob)
