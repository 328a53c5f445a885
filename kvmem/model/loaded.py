"""A model as read from disk: its facts, its tensors on the host, its tokenizer, its id.

The model id answers "whose bytes are these keys and values": two runs may share stored
pages only if it is equal. Law: it is taken over host tensors before any placement, so
it is the same at every TP, on every device and for every page size. It covers, in this
order, and nothing else:

    1. the scheme's own name and version;
    2. of every tensor, sorted by name: name, dtype, shape, SHA-256 of its bytes
       (C order, little-endian);
    3. the tokenizer: digest of its declared data (`Tokenizer.identity`), and the chat
       template's text;
    4. the config that changes numbers: the fields in `NUMBERS`, or a hybrid's facts.

The model's name, its longest position and its end-of-text ids are not in it.
"""

import concurrent.futures
import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Mapping

import numpy as np

from kvmem.model.hybrid.spec import HybridSpec
from kvmem.model.spec import ModelSpec
from kvmem.model.tokenizer import Tokenizer

__all__ = ["NUMBERS", "LoadedModel", "id_of", "model_facts", "model_id"]
__all__ += ["tensor_digests"]

NUMBERS = (
    "hidden",
    "mlp",
    "layers",
    "heads",
    "kv_heads",
    "head_dim",
    "vocab",
    "norm_eps",
    "tie_embeddings",
    "rope",
    "qkv_bias",
    "qk_norm",
)


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedModel:
    """What a loader returns.

    `params` are host arrays under Hugging Face names in `[out, in]` layout, possibly
    read-only views of a mapped file. `digests` are theirs if the loader took them.
    """

    spec: ModelSpec | HybridSpec
    params: Mapping[str, np.ndarray] = dataclasses.field(repr=False)
    tokenizer: Tokenizer = dataclasses.field(repr=False)
    source: str
    digests: Mapping[str, str] | None = dataclasses.field(default=None, repr=False)

    @functools.cached_property
    def facts(self) -> dict[str, object]:
        """Return every fact that the model id digests, JSON types only."""
        return model_facts(self.params, self.tokenizer, self.spec, self.digests)

    @functools.cached_property
    def model_id(self) -> str:
        """Return whose bytes this model's keys and values are (64 hex digits)."""
        return id_of(self.facts)

    @property
    def dtype(self) -> str:
        """Dtype of the tensors; loaders give all of them one."""
        return next(iter(self.params.values())).dtype.name

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(array.nbytes for array in self.params.values())


def model_id(
    params: Mapping[str, np.ndarray],
    tokenizer: Tokenizer,
    spec: ModelSpec | HybridSpec,
    digests: Mapping[str, str] | None = None,
) -> str:
    """Digest tensors, tokenizer and number-changing config; see `model_facts`."""
    return id_of(model_facts(params, tokenizer, spec, digests))


def id_of(facts: Mapping[str, object]) -> str:
    """Return the id that these facts have, whoever tells them."""
    text = json.dumps(facts, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def model_facts(
    params: Mapping[str, np.ndarray],
    tokenizer: Tokenizer,
    spec: ModelSpec | HybridSpec,
    digests: Mapping[str, str] | None = None,
) -> dict[str, object]:
    """Return what the model id digests, as the file's head lists it.

    Args:
        params: host tensors by name.
        tokenizer, spec: of the same model.
        digests: `tensor_digests(params)` if already known.
    """
    digests = tensor_digests(params) if digests is None else digests
    return {
        "scheme": "kvmem model id 1",
        "tensors": [
            [name, params[name].dtype.name, list(params[name].shape), digests[name]]
            for name in sorted(params)
        ],
        "tokenizer": tokenizer.identity,
        "chat_template": tokenizer.template,
        "numbers": _numbers(spec),
    }


def _numbers(spec: ModelSpec | HybridSpec) -> dict[str, object]:
    """Return the facts of a config that change what is computed."""
    if isinstance(spec, HybridSpec):
        return spec.numbers
    facts = dataclasses.asdict(spec)
    numbers = {name: value for name, value in facts.items() if name in NUMBERS}
    if numbers["rope"]["kind"] == "plain":  # said where it is not, so ids last
        del numbers["rope"]["kind"]
    return numbers


def tensor_digests(params: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Return the SHA-256 of each tensor's bytes, hashed in threads."""
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
        return dict(zip(params, threads.map(_digest, params.values()), strict=True))


def _digest(array: np.ndarray) -> str:
    """Hash the bytes of one array in C order, little-endian."""
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    flat = np.ascontiguousarray(little).reshape(-1)
    return hashlib.sha256(flat.view(np.uint8)).hexdigest()
