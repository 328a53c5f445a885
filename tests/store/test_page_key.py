import hashlib
import itertools
import struct

import numpy as np
import pytest

from kvmem.errors import ConfigError, FormatMismatch, InvalidId
from kvmem.store import page_key
from kvmem.store.page_key import Extra, PageKey, chain_keys

TOKENS = [504, 3575, 282, 4649, 314, 7042, 30, 198, 198]
GOLDEN = (
    "d22e9c2b44269307d7bef383636d033f0d9fe32cdbec7437c823664a4952da79",
    "e19c5c9cd9ba528c160091325ac8008f01a3d3c30a122252a554ee8fdb789324",
    "655289c8ba9b87945771e5aee055ff5a5b5405e5908c2be0bbc6e592e5394269",
)


def by_hand(namespace: str, tokens: list[int], chunk: int) -> list[bytes]:
    """The derivation once more, for plain text, in the simplest words."""

    def sized(data: bytes) -> bytes:
        return struct.pack("<Q", len(data)) + data

    no_extras = struct.pack("<Q", 0)
    head = b"kvmem.page_key.v1.seed\0" + sized(namespace.encode()) + no_extras
    keys = [hashlib.sha256(head).digest()]
    for i in range(len(tokens) // chunk):
        body = struct.pack(f"<{chunk}i", *tokens[i * chunk : (i + 1) * chunk])
        message = b"kvmem.page_key.v1.chunk\0" + keys[-1] + sized(body) + no_extras
        keys.append(hashlib.sha256(message).digest())
    return keys


def test_digests_are_pinned():
    keys = (page_key.seed("m/f"), *chain_keys("m/f", TOKENS, 4))
    assert tuple(key.hex() for key in keys) == GOLDEN
    assert list(keys) == by_hand("m/f", TOKENS, 4)


def test_only_full_chunks_have_keys():
    lengths = [len(chain_keys("m/f", TOKENS[:n], 4)) for n in range(10)]
    assert lengths == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert len(chain_keys("m/f", np.arange(700))) == 43


def test_a_longer_text_begins_with_the_keys_of_its_prefix():
    keys = chain_keys("m/f", TOKENS, 1)
    for n in range(len(TOKENS)):
        assert chain_keys("m/f", TOKENS[:n], 1) == keys[:n]


def test_link_continues_a_chain():
    first, second = chain_keys("m/f", TOKENS, 4)
    assert page_key.link(page_key.seed("m/f"), TOKENS[:4]) == first
    assert page_key.link(first, np.array(TOKENS[4:8], np.int64)) == second


def test_every_input_matters():
    base = chain_keys("m/f", TOKENS[:8], 4)[-1]
    others = [
        chain_keys("m/g", TOKENS[:8], 4)[-1],
        chain_keys("m/f", TOKENS[:8], 8)[-1],
        chain_keys("m/f", TOKENS[:8], 2)[-1],
        chain_keys("m/f", [505, *TOKENS[1:8]], 4)[-1],
        chain_keys("m/f", [*TOKENS[:7], 197], 4)[-1],
        chain_keys("m/f", TOKENS[4:8] + TOKENS[:4], 4)[-1],
        chain_keys("m/f", TOKENS[4:8], 4)[-1],
    ]
    assert len({base, *others}) == 1 + len(others)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16, ">i4", "<i8"])
def test_the_type_and_the_strides_of_the_tokens_do_not_matter(dtype):
    expected = chain_keys("m/f", TOKENS, 4)
    assert chain_keys("m/f", np.array(TOKENS, dtype), 4) == expected
    assert chain_keys("m/f", np.repeat(np.array(TOKENS, dtype), 3)[::3], 4) == expected


@pytest.mark.case("PFX-05")
def test_keys_are_equal_in_every_process_whatever_the_hash_seed(run_python):
    code = (
        "from kvmem.store import Extra, chain_keys\n"
        f"print(*(k.hex() for k in chain_keys('m/f', {TOKENS}, 4)))\n"
        "extras = [Extra('salt', ('s', 1, b'x'))]\n"
        "print(chain_keys('m/f', range(4), 4, extras)[0].hex())"
    )
    printed = [run_python(code, PYTHONHASHSEED=seed) for seed in (None, "0", "123")]
    assert len(set(printed)) == 1
    assert printed[0].split()[:2] == list(GOLDEN[1:])


@pytest.mark.case("PFX-05")
def test_the_process_check_would_see_a_key_that_depends_on_the_hash_seed(run_python):
    code = "print(hash(('m/f', 1)))"
    assert len({run_python(code, PYTHONHASHSEED=seed) for seed in ("0", "123")}) == 2


@pytest.mark.case("PFX-06")
def test_tokens_that_a_weak_hash_confuses_have_different_keys():
    left, right = [5, -1, 7, 8], [5, -2, 7, 8]
    assert hash(tuple(left)) == hash(tuple(right))
    assert chain_keys("m/f", left, 4) != chain_keys("m/f", right, 4)


@pytest.mark.case("PFX-06")
@pytest.mark.parametrize("token", [2**61 - 1, 2**32, 2**31, -(2**31) - 1, 2**70])
def test_an_id_beyond_int32_has_no_key_so_it_cannot_share_one(token):
    """2**32 wrapped into int32 would be 0."""
    with pytest.raises(FormatMismatch, match="int32"):
        chain_keys("m/f", [token, 3], 2)
    assert len(chain_keys("m/f", [2**31 - 1, -(2**31)], 2)) == 1


@pytest.mark.parametrize("tokens", [[0.5, 1.0], [True, False], ["a", "b"]])
def test_what_is_no_integer_is_no_token(tokens):
    with pytest.raises(FormatMismatch, match="integers"):
        chain_keys("m/f", tokens, 2)


def test_extras_that_differ_in_one_thing_never_share_a_key():
    variants = [
        (),
        (Extra("adapter", ("math", 1)),),
        (Extra("adapter", ("math", 2)),),
        (Extra("adapter", ("math", "1")),),
        (Extra("adapter", ("math", b"1")),),
        (Extra("adapter", ("math1",)),),
        (Extra("salt", ("math", 1)),),
        (Extra("salt", ("math",)),),
        (Extra("adapter", ("math", 1)), Extra("salt", ("math",))),
        (Extra("adapter", ("math",)), Extra("salt", ("math", 1))),
        (Extra("adapters", ("alt", "math")),),
    ]
    keys = [chain_keys("m/f", TOKENS, 4, extras) for extras in variants]
    assert len({key for chain in keys for key in chain}) == 2 * len(variants)
    assert keys[0] == chain_keys("m/f", TOKENS, 4)
    assert all(a != b for a, b in itertools.combinations(keys, 2))


def test_the_order_of_extras_does_not_matter():
    extras = Extra("adapter", ("math", 1)), Extra("salt", ("x",))
    assert chain_keys("m/f", TOKENS, 4, extras) == chain_keys(
        "m/f", TOKENS, 4, extras[::-1]
    )


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("", ("x",)),
        ("salt", ()),
        ("salt", ("",)),
        ("salt", (b"",)),
        ("salt", (None,)),
        ("salt", (True,)),
        ("salt", (1.5,)),
    ],
)
def test_an_extra_that_says_nothing_is_refused(kind, values):
    with pytest.raises(InvalidId, match="Leave the extra out"):
        Extra(kind, values)


def test_an_extra_said_twice_is_refused():
    with pytest.raises(InvalidId, match="once"):
        page_key.seed("m/f", [Extra("salt", ("x",))] * 2)


@pytest.mark.parametrize("namespace", ["", None, 7])
def test_a_namespace_is_a_name(namespace):
    with pytest.raises(InvalidId, match="non-empty string"):
        chain_keys(namespace, TOKENS)


def test_chunks_hold_tokens():
    with pytest.raises(ConfigError, match="at least one token"):
        chain_keys("m/f", TOKENS, 0)


def test_a_key_is_32_bytes_and_equals_its_bytes():
    key = chain_keys("m/f", TOKENS, 4)[0]
    assert {key: 1}[bytes(key)] == 1
    assert repr(key) == f"PageKey({key.hex()[:12]}…)"
    with pytest.raises(InvalidId, match="32 bytes"):
        PageKey(key[:-1])


def test_extras_of_a_chunk_change_its_key_and_those_behind_it():
    plain = chain_keys("m/f", range(16), 4)
    assert chain_keys("m/f", range(16), 4, chunk_extras={}) == plain
    cat, dog = Extra("image", (b"c" * 32, 1, 4)), Extra("image", (b"d" * 32, 1, 4))
    with_cat = chain_keys("m/f", range(16), 4, chunk_extras={2: (cat,)})
    with_dog = chain_keys("m/f", range(16), 4, chunk_extras={2: (dog,)})
    moved = chain_keys("m/f", range(16), 4, chunk_extras={3: (cat,)})
    whole = chain_keys("m/f", range(16), 4, (cat,))
    assert with_cat[:2] == with_dog[:2] == plain[:2] and moved[:3] == plain[:3]
    later = [keys[at] for keys in (plain, with_cat, with_dog) for at in (2, 3)]
    assert len({*later, moved[3], *whole}) == 6 + 1 + 4
    assert with_cat[2] == page_key.link(plain[1], range(8, 12), [cat])
