"""Names of SGLang's algorithms and backends, and how a row of its gates is made.

What a server was not told about a backend is not judged: rows ask the names it has.
"""

from collections.abc import Callable, Iterable

from kvmem.speculative.gates import Advice, Gate, Question
from kvmem.speculative.plan import SpecPlan

__all__ = ["ALGORITHMS", "AUDITED", "BLACKWELL_MLA", "EAGLES", "NAME", "among"]
__all__ = [*__all__, "listed", "row", "target_backends"]

NAME = "sglang"
EAGLES = ("eagle", "eagle3", "mtp", "standalone")
ALGORITHMS = (*EAGLES, "frozen_kv_mtp", "dflash", "dspark", "ngram")
BLACKWELL_MLA = ("trtllm_mla", "tokenspeed_mla", "cutedsl_mla")
AUDITED = ("triton", *BLACKWELL_MLA, "flashmla", "flashinfer", "fa3")

Words = str | Callable[[SpecPlan], str]


def row(
    name: str, applies: Question, allows: Question, asked: Words, law: str, cure: Words
) -> Gate:
    """Return a row whose words are texts, or functions of the plan."""

    def advice(plan: SpecPlan) -> Advice:
        return Advice(_said(asked, plan), law, _said(cure, plan))

    return Gate(name, applies, allows, advice)


def target_backends(plan: SpecPlan) -> tuple[str, ...]:
    """Return the backends of the target that were told, each once."""
    names = plan.backends.of_prefill, plan.backends.of_decode
    return tuple(dict.fromkeys(name for name in names if name is not None))


def among(names: Iterable[str], allowed: Iterable[str]) -> bool:
    """Say whether every name is an allowed one."""
    return set(names) <= set(allowed)


def listed(names: Iterable[object]) -> str:
    """Return names as a list in words, "none" without any."""
    return ", ".join(map(str, names)) or "none"


def _said(words: Words, plan: SpecPlan) -> str:
    return words if isinstance(words, str) else words(plan)
