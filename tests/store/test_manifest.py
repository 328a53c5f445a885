import json

import pytest

from kvmem.errors import CorruptPage
from kvmem.store import manifest

BODY = {"version": 1, "files": {"orbax/records/c/0": [404, "ab" * 16]}, "é": "ü"}


def test_a_manifest_is_plain_json_and_comes_back():
    data = manifest.pack(BODY)
    assert json.loads(data)["body"] == BODY
    assert manifest.unpack(data) == BODY


def test_any_flipped_bit_is_seen():
    data = manifest.pack(BODY)
    for position in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            with pytest.raises(CorruptPage, match="digest"):
                manifest.unpack(bytes(damaged))


def test_any_truncation_and_an_appended_byte_are_seen():
    data = manifest.pack(BODY)
    for damaged in [data[:n] for n in range(len(data))] + [data + b"\n", data + b"}"]:
        with pytest.raises(CorruptPage):
            manifest.unpack(damaged)
