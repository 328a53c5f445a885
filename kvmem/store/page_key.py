"""Page keys: the name of a chunk of tokens and of everything before it.

A key is the SHA-256 digest over (parent key, the chunk's tokens, typed extras); the
first parent is a seed made from the namespace. So one key names a whole prefix, and
equal keys mean equal prefixes in every process and on every machine, whatever
PYTHONHASHSEED says.

The law: the hashed message can be read back in one way only. Every field carries its
length, every scalar its type, seeds and chunks have domains of their own, and an extra
that is not there adds nothing; so an adapter named like a salt never meets it, and
keys of plain text do not change when kinds of extras are added.

    keys = chain_keys("model/format", tokens, chunk_tokens=16)   # full chunks only
"""

import dataclasses
import hashlib
import struct
from collections.abc import Mapping, Sequence

import numpy as np

from kvmem.errors import ConfigError, FormatMismatch, InvalidId, say

KEY_NBYTES = 32
_SEED = b"kvmem.page_key.v1.seed\0"
_CHUNK = b"kvmem.page_key.v1.chunk\0"


class PageKey(bytes):
    """The 32 bytes that name a chunk together with all chunks before it."""

    __slots__ = ()

    def __new__(cls, digest: bytes) -> "PageKey":
        """Check the length and wrap `digest`."""
        if not isinstance(digest, bytes) or len(digest) != KEY_NBYTES:
            what = f"{len(digest)} bytes" if isinstance(digest, bytes) else repr(digest)
            raise InvalidId(
                say(
                    f"a page key of {what}",
                    f"a page key is a SHA-256 digest of {KEY_NBYTES} bytes",
                    "Make keys with chain_keys(namespace, tokens)",
                )
            )
        return super().__new__(cls, digest)

    def __repr__(self) -> str:
        return f"PageKey({self.hex()[:12]}…)"


@dataclasses.dataclass(frozen=True)
class Extra:
    """A fact besides the tokens that changes what a chunk's records are.

    `Extra("adapter", ("math", 2))`, `Extra("salt", ("tenant-7",))`. Nothing is said by
    leaving the extra out; an empty kind or value is refused, so that "no salt" and
    "the empty salt" cannot be mistaken for one another.
    """

    kind: str
    values: tuple[str | int | bytes, ...]

    def __post_init__(self):
        _encode_extra(self)


def seed(namespace: str, extras: Sequence[Extra] = ()) -> PageKey:
    """Return the parent of first chunks, from what holds for the whole text."""
    if not isinstance(namespace, str) or not namespace:
        raise InvalidId(
            say(
                f"page keys in namespace {namespace!r}",
                "a namespace is a non-empty string, or two models would share keys",
                'Use for example f"{model_id}/{format_id}"',
            )
        )
    message = _SEED + _sized(_utf8(namespace)) + _encode_extras(extras)
    return PageKey(hashlib.sha256(message).digest())


def link(parent: PageKey, tokens: np.ndarray, extras: Sequence[Extra] = ()) -> PageKey:
    """Return the key of the chunk `tokens` that follows `parent`."""
    body = np.asarray(token_array(tokens), "<i4").tobytes()
    return _link(parent, body, _encode_extras(extras))


def chain_keys(
    namespace: str,
    tokens: Sequence[int] | np.ndarray,
    chunk_tokens: int = 16,
    extras: Sequence[Extra] = (),
    chunk_extras: Mapping[int, Sequence[Extra]] | None = None,
) -> tuple[PageKey, ...]:
    """Return one key for every full chunk of `tokens`; a partial tail has none.

    Args:
        namespace: whose tokens these are, e.g. model id and format id.
        tokens: token ids, one dimension, each within int32.
        chunk_tokens: tokens a chunk, the store's own number.
        extras: facts that hold for the whole text (adapter, salt); they enter the seed.
        chunk_extras: facts of one chunk (images), by its number; they enter its key,
            and so those of all that follow.
    """
    if chunk_tokens < 1:
        raise ConfigError(
            say(
                f"chunk_tokens={chunk_tokens}",
                "a chunk holds at least one token",
                "Use the store's chunk_tokens, 16 by default",
            )
        )
    body = memoryview(np.asarray(token_array(tokens), "<i4").tobytes())
    nbytes = 4 * chunk_tokens
    key, keys, no_extras = seed(namespace, extras), [], _encode_extras(())
    encoded = {at: _encode_extras(said) for at, said in (chunk_extras or {}).items()}
    for number in range(len(body) // nbytes):
        chunk = body[number * nbytes : (number + 1) * nbytes]
        key = _link(key, chunk, encoded.get(number, no_extras))
        keys.append(key)
    return tuple(keys)


def token_array(tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return `tokens` as contiguous i32 of the same shape, refusing what does not fit.

    An id beyond int32 is refused, never wrapped: wrapping would give two texts one key.
    """
    array = np.asarray(tokens)
    if array.size == 0:
        return np.zeros(array.shape, np.int32)
    if array.dtype.kind not in "iu":
        raise FormatMismatch(
            say(
                f"tokens of type {array.dtype}",
                "token ids are integers within int32",
                "Pass token ids as integers",
            )
        )
    low, high = int(array.min()), int(array.max())
    limits = np.iinfo(np.int32)
    if low < limits.min or high > limits.max:
        raise FormatMismatch(
            say(
                f"token ids from {low} to {high}",
                f"token ids lie within int32, {limits.min} to {limits.max}",
                "Pass the tokenizer's own ids",
            )
        )
    return np.ascontiguousarray(array, np.int32)


def _link(parent: PageKey, body: bytes | memoryview, extras: bytes) -> PageKey:
    message = b"".join((_CHUNK, parent, struct.pack("<Q", len(body)), body, extras))
    return PageKey(hashlib.sha256(message).digest())


def _encode_extras(extras: Sequence[Extra]) -> bytes:
    """Return a count and the extras in an order of their own; repeats are refused."""
    encoded = sorted(_encode_extra(extra) for extra in extras)
    if len(set(encoded)) != len(encoded):
        raise InvalidId(
            say(
                f"extras {tuple(extras)}",
                "an extra is said once",
                "Leave the repeated one out",
            )
        )
    return struct.pack("<Q", len(encoded)) + b"".join(encoded)


def _encode_extra(extra: Extra) -> bytes:
    kind, values = extra.kind, extra.values
    if not isinstance(kind, str) or not kind or not values:
        raise InvalidId(
            say(
                f"extra {kind!r} with values {values!r}",
                "an extra has a non-empty kind and at least one value",
                "Leave the extra out where there is nothing to say",
            )
        )
    fields = [_encode_scalar(kind, value) for value in values]
    return _sized(_utf8(kind)) + struct.pack("<Q", len(fields)) + b"".join(fields)


def _encode_scalar(kind: str, value: str | int | bytes) -> bytes:
    match value:
        case str() if value:
            return b"s" + _sized(_utf8(value))
        case bytes() if value:
            return b"b" + _sized(value)
        case int() if not isinstance(value, bool):
            return b"i" + _sized(str(value).encode())
    raise InvalidId(
        say(
            f"extra {kind!r} with value {value!r}",
            "values are non-empty str, non-empty bytes or int",
            "Leave the extra out where there is nothing to say",
        )
    )


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidId(
            say(
                f"{text!r} in a page key",
                "half a surrogate pair has no UTF-8, so no two machines would agree",
                "Pass text that can be encoded, or bytes",
            )
        ) from error


def _sized(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data
