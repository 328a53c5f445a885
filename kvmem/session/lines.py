r"""The log's bytes: one line a message, checked line by line.

The law: a batch counts when all its lines are there and right, else none of it does.
What a write that was cut off can leave stands at the end of the file and is *torn*: it
is cut and kept aside. That is a beginning of the batch, or the batch with holes of
whole units of a disk, which read as zeros. What it cannot leave is damage, in the last
line too, and damage is an error that names the line: nothing in a log is ever skipped.

    {"format": "kvmem.session.log", "version": 1, ..., "first": 0, "crc": "…"}
    {"seq": 0, "k": 0, "of": 1, "key": "k1", "digest": "…", "message": {…}, "crc": "…"}

Lines end in "\n" alone and are ASCII, so no separator in a text can split one. The crc
is of all bytes before it.
"""

import json
import re
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import xxhash

from kvmem.errors import CorruptPage, say
from kvmem.session import message
from kvmem.session.identity import Identity

FORMAT = "kvmem.session.log"
_SEAL = b',"crc":"'
_SEAL_NBYTES = len(_SEAL) + 10
_UNIT_NBYTES = 8  # what a persistent memory writes at least; a disk's sector is 512
_HOLE = re.compile(rb"\0+")


class Clock(NamedTuple):
    """How far a session has come, counted from its first message."""

    messages: int = 0
    turns: int = 0  # messages of the user
    tokens: int = 0  # as message.num_tokens estimates them


class Batch(NamedTuple):
    """Where an acknowledged batch of a key stands."""

    first: int
    stop: int
    digest: str


class Line(NamedTuple):
    """One message as it stands in the log."""

    seq: int
    k: int  # its place in its batch
    stored: Mapping
    raw: bytes  # with its newline


class Log(NamedTuple):
    """What a log holds: everything up to `nbytes` is right."""

    start: Clock  # before the first line: commits moved what was there
    lines: tuple[Line, ...]
    clock: Clock  # after the last line
    keys: Mapping[str, Batch]
    nbytes: int
    digest: bytes  # of those bytes
    carrying: tuple[Line, ...] = ()  # the lines that say what was served with them
    torn: bytes = b""  # behind them: what a write that was cut off left


def seal(fields: Mapping) -> bytes:
    """Return a line of ASCII JSON that ends in its crc and a newline."""
    body = json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()[:-1]
    return body + _SEAL + f'{zlib.crc32(body):08x}"}}\n'.encode()


def unseal(raw: bytes) -> dict | None:
    """Return a line's fields, without its newline; None if it is not right."""
    body, sealed = raw[:-_SEAL_NBYTES], raw[-_SEAL_NBYTES:]
    if sealed != _SEAL + f'{zlib.crc32(body):08x}"}}'.encode():
        return None
    return json.loads(body + b"}")


def is_right(data: bytes, fields: Mapping, before: Collection[str]) -> bool:
    """Say whether a file of one sealed line is right.

    Args:
        data: the file's bytes.
        fields: what they say as JSON.
        before: the fields of such a file of an older kvmem, which had no crc.
    """
    return unseal(data.removesuffix(b"\n")) is not None or set(fields) == set(before)


def header(identity: Identity, start: Clock) -> bytes:
    """Return the first line of a log whose first message is number `start`."""
    counts = {"first": start.messages, "turns": start.turns, "tokens": start.tokens}
    return seal(identity.head(FORMAT) | counts)


def batch(seq: int, stored: Sequence[Mapping], key: str | None, digest: str) -> bytes:
    """Return the lines of a batch, to be written with one write."""
    return b"".join(
        seal(
            {"seq": seq + k, "k": k, "of": len(stored)}
            | ({} if key is None else {"key": key, "digest": digest})
            | {"message": each}
        )
        for k, each in enumerate(stored)
    )


def scan(data: bytes, identity: Identity) -> Log:
    """Return what a log's bytes hold.

    Raises:
        CorruptPage: a line is damaged that no cut-off write can have damaged.
        FormatMismatch: it is another session's log, or of another version.
    """
    head, newline, _ = data.partition(b"\n")
    fields = unseal(head) if newline else None
    if fields is None:
        raise _damaged(identity, 1, "its first line is damaged")
    identity.check(fields, FORMAT)
    start = Clock(fields["first"], fields["turns"], fields["tokens"])
    nbytes = len(head) + 1
    empty = Log(start, (), start, {}, nbytes, xxhash.xxh3_128_digest(data[:nbytes]))
    return extend(empty, data, identity)


def extend(log: Log, data: bytes, identity: Identity) -> Log:
    """Return what a log's bytes hold whose first `log.nbytes` are known."""
    pieces = data[log.nbytes :].split(b"\n")
    lines, keys, clock = list(log.lines), dict(log.keys), log.clock
    opened: list[tuple[dict, bytes]] = []  # of a batch that is not whole yet
    carrying, nbytes, at = list(log.carrying), log.nbytes, 0
    for at, piece in enumerate(pieces):
        fields = unseal(piece) if at < len(pieces) - 1 else None
        if fields is None:
            break
        if not _follows(fields, opened, clock.messages):
            number = 2 + len(log.lines) + at
            raise _damaged(identity, number, "it does not follow the line before")
        opened.append((fields, piece + b"\n"))
        if len(opened) == fields["of"]:
            nbytes += sum(len(raw) for _, raw in opened)
            whole = [Line(f["seq"], f["k"], f["message"], raw) for f, raw in opened]
            lines += whole
            carrying += [line for line in whole if "carries" in line.stored]
            first = opened[0][0]
            if "key" in first:
                stop = first["seq"] + first["of"]
                keys[first["key"]] = Batch(first["seq"], stop, first["digest"])
            clock = advance(clock, [f["message"] for f, _ in opened])
            opened = []
    if law := _broken(data[nbytes:], nbytes, pieces[at:], clock.messages):
        raise _damaged(identity, 2 + len(log.lines) + at, law)
    digest = xxhash.xxh3_128_digest(data[:nbytes])
    return Log(
        log.start,
        tuple(lines),
        clock,
        keys,
        nbytes,
        digest,
        tuple(carrying),
        data[nbytes:],
    )


def advance(clock: Clock, stored: Sequence[Mapping]) -> Clock:
    """Return the clock after these messages."""
    return Clock(
        clock.messages + len(stored),
        clock.turns + sum(each["role"] == "user" for each in stored),
        clock.tokens + sum(map(message.num_tokens, stored)),
    )


def _follows(fields: Mapping, opened: Sequence, first: int) -> bool:
    """Say whether a right line is the next of its batch, and that the next batch."""
    k = len(opened)
    is_same = not k or all(
        fields.get(name) == opened[0][0].get(name) for name in ("of", "key")
    )
    place = (fields.get("k"), fields.get("seq"))
    return is_same and place == (k, first + k) and k < fields["of"]


def _broken(rest: bytes, at: int, pieces: Sequence[bytes], first: int) -> str | None:
    """Say what no write that was cut off has left behind the last whole batch.

    Args:
        rest: the bytes there.
        at: where in the file they begin.
        pieces: of them from the first that is no right line on; the last has no
            newline.
        first: the message that the batch would begin with.
    """
    *ended, last = pieces
    if not ended:  # a line may be cut, and may not end in something else
        return "its end is damaged" if unseal(last[:-1]) else None
    if not _holes_are_whole(rest, at):
        return "it is damaged"
    for piece in ended:
        fields = unseal(piece)
        if fields is None and b"\0" not in piece:
            return "it is damaged"
        if fields and fields.get("seq", -1) - fields.get("k", 0) != first:
            return "it is damaged, and right lines follow it"
    return None


def _holes_are_whole(rest: bytes, at: int) -> bool:
    """Say whether all zeros are of whole units of a disk, but for where a write ends.

    A text has none: they are escaped. So a bit that makes one of a letter is seen.
    """
    return all(
        (hole.start() == 0 or (at + hole.start()) % _UNIT_NBYTES == 0)
        and (hole.end() == len(rest) or (at + hole.end()) % _UNIT_NBYTES == 0)
        for hole in _HOLE.finditer(rest)
    )


def _damaged(identity: Identity, number: int, law: str) -> CorruptPage:
    asked = f"line {number} of the log of session {identity.session!r}"
    cure = "Put messages.jsonl back from a copy; nothing was skipped or changed"
    return CorruptPage(say(asked, law, cure))
