"""The table [blend]: how text that was computed once is used at another place.

BlendConfig(ratio=0.15).num_recomputed(1_500)      # 225
"""

import dataclasses
import math

from kvmem import errors, settings

__all__ = ["BlendConfig"]

_ROUNDING = 1e-9  # 0.29 * 100 is 29, though floats say 28.999...


@dataclasses.dataclass(frozen=True)
class BlendConfig:
    """How much of a text that is found again is computed anew, and where.

    Args:
        ratio: share of the tokens found again that is recomputed: those whose keys
            deviate most at the check layer. 0: none, 1: all of them, which is a plain
            prefill.
        check_layer: layers up to this one are computed for every token; its keys are
            what is compared. The second by default, as CacheBlend has it.
        chunk_tokens: tokens of a chunk by which a text is found; any run of twice as
            many is.
        min_tokens: reused tokens below which a text is simply computed.
        allow_stale_selector: reuse index keys that cannot be turned to their new place
            (a Hadamard mix behind their rotation) as they are; what they select is
            then approximate too, and the gate's record says so.
        gate: record of `kvmem blend check`, which an engine made from a config wants
            to see before it blends.
        min_agreement: share of next tokens that must be those of a full recompute for
            the gate to pass.
        max_kl: mean divergence of the next token's distribution, in nats, up to which
            the gate passes.
    """

    ratio: float = 0.15
    check_layer: int = 1
    chunk_tokens: int = 32
    min_tokens: int = 64
    allow_stale_selector: bool = False
    gate: str | None = None
    min_agreement: float = 0.9
    max_kl: float = 0.25

    def __post_init__(self):
        settings.settle(self)
        laws = {
            "0 <= ratio <= 1": 0 <= self.ratio <= 1,
            "check_layer >= 0": self.check_layer >= 0,
            "chunk_tokens >= 1": self.chunk_tokens >= 1,
            "min_tokens >= 1": self.min_tokens >= 1,
            "0 <= min_agreement <= 1": 0 <= self.min_agreement <= 1,
            "max_kl >= 0": self.max_kl >= 0,
        }
        broken = [law for law, holds in laws.items() if not holds]
        if broken:
            raise errors.ConfigError(
                errors.say(
                    f"blending with {self}",
                    f"the law is {', '.join(broken)}",
                    "Change the values named",
                )
            )

    @property
    def recomputes_all(self) -> bool:
        """Say whether nothing is left to reuse."""
        return self.ratio == 1

    def num_recomputed(self, num_reused: int) -> int:
        """Return the whole part of ratio x tokens: of few tokens it is none.

        Then only the tokens that were not found are computed, over reused ones that
        never saw each other.
        """
        return math.floor(num_reused * self.ratio + _ROUNDING)
