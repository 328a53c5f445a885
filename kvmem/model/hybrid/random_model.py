"""A hybrid model with random weights: the same bytes for the same facts and seed.

No checkpoint is small enough to study every kind of memory on a laptop, so the weights
are drawn, scaled so that activations stay near one and a greedy text does not repeat
one token. Tokens are bytes, and one id more ends a text.

    model = make(settings.Table({"model_type": "gpt_oss", ...}), seed=0)
    model.tokenizer.encode("abc")        # [97, 98, 99] as the vocabulary orders them
"""

import hashlib
import math

import numpy as np
import tokenizers

from kvmem import settings
from kvmem.errors import ConfigError, say
from kvmem.model.hybrid.spec import HybridSpec
from kvmem.model.hybrid.weights import Weight
from kvmem.model.loaded import LoadedModel
from kvmem.model.tokenizer import Tokenizer

__all__ = ["EOS", "TEMPLATE", "byte_core", "byte_tokenizer", "make"]

EOS = "<eos>"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def make(
    facts: settings.Table, seed: int, dtype: str = "float32", name: str = "random"
) -> LoadedModel:
    """Draw a model.

    Args:
        facts: the fields of its config (`kvmem.model.hybrid.spec.HybridSpec`).
        seed: of the weights.
        dtype: of the weights; they are drawn in float32.
        name: for people.

    Raises:
        ConfigError: facts that are not understood, or a vocabulary without room for
            256 bytes and an end.
    """
    spec = HybridSpec(name, facts)
    params = {
        key: _drawn(weight, _generator(seed, key)).astype(dtype)
        for key, weight in spec.weights().items()
    }
    tokenizer = byte_tokenizer(spec.eos_ids)
    if spec.vocab <= tokenizer.max_id:
        raise ConfigError(
            say(
                f"a vocabulary of {spec.vocab} for a model of bytes",
                f"256 bytes and an end take {tokenizer.max_id + 1} ids",
                f"Set vocab_size to {tokenizer.max_id + 1} or more",
            )
        )
    return LoadedModel(spec, params, tokenizer, source=name)


def byte_tokenizer(eos_ids: tuple[int, ...] = ()) -> Tokenizer:
    """Return a tokenizer whose ids are the 256 bytes, and 256 for an end."""
    core = byte_core()
    identity = hashlib.sha256(b"kvmem bytes 1\0" + core.to_str().encode()).hexdigest()
    return Tokenizer(core, {"eos_token": EOS}, eos_ids, TEMPLATE, identity)


def byte_core() -> tokenizers.Tokenizer:
    """Return the same as the `tokenizers` library has it, to be wrapped or saved."""
    symbols = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: at for at, symbol in enumerate(symbols)}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    core.decoder = tokenizers.decoders.ByteLevel()
    core.add_special_tokens([EOS])
    return core


def _generator(seed: int, name: str) -> np.random.Generator:
    """Return the generator of one tensor: no tensor's bytes depend on another's."""
    digest = hashlib.sha256(name.encode()).digest()
    return np.random.default_rng([seed, *np.frombuffer(digest, np.uint32).tolist()])


def _drawn(weight: Weight, rng: np.random.Generator) -> np.ndarray:
    """Draw one tensor."""
    noise = rng.standard_normal(weight.shape, np.float32)
    match weight.drawn:
        case "matrix":
            return noise / np.float32(math.sqrt(weight.shape[-1]))
        case "norm":
            return 1 + np.float32(0.2) * noise
        case "zero norm":
            return np.float32(0.2) * noise
        case "rate":  # decays between exp(-0.1) and exp(-2) a token, or so
            return np.log(rng.uniform(0.1, 2.0, weight.shape)).astype(np.float32)
        case "bias":
            return np.float32(0.5) * noise
