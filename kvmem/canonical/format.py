"""Format: what the bytes of a model's records mean, as one id.

The id is a digest of a version and of every fact that gives a record its meaning:
each group in order, its layers by number, their fields, heads, widths, dtypes, scales,
windows and rope. Topology, page size, page order and names of layers are no part of it,
so every deployment of one model shares one id, and two rope thetas never do.

    format_id(groups)        # "v1-3f0c...": names a folder of the store
    format_fields(groups)    # the facts behind it, to be printed or compared
"""

import hashlib
import json
from collections.abc import Mapping, Sequence

from kvmem.geometry.fields import LayerSpec
from kvmem.geometry.groups import LifecycleGroup
from kvmem.geometry.rope import Rope

__all__ = ["FORMAT_VERSION", "format_fields", "format_id", "id_of"]

FORMAT_VERSION = 1  # a change to record bytes or to the facts below raises it
_DIGEST_CHARS = 32  # 128 bits

Facts = dict[str, object]


def format_id(groups: Sequence[LifecycleGroup]) -> str:
    """Return the id of the records of these groups, equal in every process."""
    return id_of(format_fields(groups))


def id_of(fields: Mapping[str, object]) -> str:
    """Return the id that these fields have, whoever tells them."""
    facts = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(b"kvmem format\0" + facts.encode()).hexdigest()
    return f"v{fields.get('version')}-{digest[:_DIGEST_CHARS]}"


def format_fields(groups: Sequence[LifecycleGroup]) -> Facts:
    """Return exactly the facts that `format_id` digests, JSON types only."""
    return {
        "version": FORMAT_VERSION,
        "record": "layer, head, field, bytes; little-endian; no padding",
        "groups": [
            {
                "domain": group.domain,
                "lifecycle": str(group.lifecycle),
                "record_nbytes": group.record_nbytes,
                "layers": [_layer(layer) for layer in group.layers],
            }
            for group in groups
        ],
    }


def _layer(layer: LayerSpec) -> Facts:
    return {
        "index": layer.index,
        "kind": layer.kind,
        "fields": [[f.name, f.heads, f.head_nbytes, f.dtype] for f in layer.fields],
        "scale": float(layer.softmax_scale),
        "window": layer.window,
        "sinks": layer.sinks,
        "rope": None if layer.rope is None else _rope(layer.rope, layer.head_dim),
    }


def _rope(rope: Rope, row_width: int) -> Facts:
    """Return the declared rotation; frequencies to 10 digits.

    A frequency that was computed (a scaled rope) may differ in its last bit from one
    machine to the next; ten digits are a tenth of a milliradian after a million tokens.
    """
    width = row_width - rope.offset if rope.width is None else rope.width
    listed = rope.frequencies
    besides = {} if rope.kind == "plain" else {"kind": rope.kind}
    return besides | {
        "theta": float(rope.theta) if listed is None else None,
        "frequencies": None if listed is None else [f"{f:.9e}" for f in listed],
        "style": rope.style,
        "offset": rope.offset,
        "width": width,
        "magnitude": float(rope.magnitude),
    }
