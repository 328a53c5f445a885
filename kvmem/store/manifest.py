"""The manifest: one small JSON file that says what a segment is and lists its files.

The law: a segment without its manifest is not there, and a manifest in which one bit
differs from what was written is not a manifest. The text is plain JSON whose first
field is the digest of the exact bytes of the second:

    {"digest":"<32 hex>","body":{ … }}
"""

import json

from kvmem.errors import CorruptPage, say
from kvmem.store import durable

NAME = "manifest.json"
VERSION = 3  # 1 had no parents in its sidecar, 2 a folder and padding for each file
_HEAD, _MIDDLE, _TAIL = b'{"digest":"', b'","body":', b"}\n"


def pack(body: dict) -> bytes:
    """Return the manifest's bytes for `body`."""
    text = json.dumps(body, indent=1, sort_keys=True).encode()
    seal = durable.digest(text).hex().encode()
    return _HEAD + seal + _MIDDLE + text + _TAIL


def unpack(data: bytes) -> dict:
    """Return the body of a manifest, or raise CorruptPage if any byte differs."""
    start = len(_HEAD) + 32 + len(_MIDDLE)
    text = data[start : -len(_TAIL)]
    seal = durable.digest(text).hex().encode()
    if data != _HEAD + seal + _MIDDLE + text + _TAIL:
        raise CorruptPage(
            say(
                f"reading a manifest of {len(data)} bytes",
                "its digest does not stand for its text",
                "Restore the file from a copy; its segment is not read meanwhile",
            )
        )
    return json.loads(text)
