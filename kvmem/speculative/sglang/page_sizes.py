"""Page sizes that backends read, intersected over every backend that runs.

SGLang mends a page size backend after backend, each with a warning: where two want
different sizes the last one wins, and the other reads pages that it cannot. Here the
sets of target, prefill, decode and draft are intersected; the law: an empty
intersection is an error that names the two that clash.

    allowed(SpecPlan(backends=Backends(draft="trtllm_mha"))).sizes    # 16, 32, 64, 128
    resolve(plan)        # the size that a server would take
"""

from collections.abc import Callable
from typing import NamedTuple

from kvmem import errors
from kvmem.speculative.gates import Advice, Gate
from kvmem.speculative.plan import SpecPlan
from kvmem.speculative.sglang.words import BLACKWELL_MLA, listed

__all__ = ["GATES", "PageSizes", "allowed", "default", "resolve"]

_ANY = tuple(range(1, 4097))
_COMPRESSED = tuple(range(128, 4097, 128))
_LONG_MHA = (0, 6, 12)  # flashinfer from which trtllm_mha reads pages of 128


class _Row(NamedTuple):
    """Sizes that a backend reads, and the one a server would take for another."""

    backends: tuple[str, ...]
    sizes: Callable[[SpecPlan], tuple[int, ...]]
    fallback: int


class PageSizes(NamedTuple):
    """The sizes that everything reads.

    Args:
        sizes: ascending; () where two backends clash.
        fallback: the size that a server takes in place of another one, None where
            nothing asks for one.
        clash: the two that have no size in common, as "role name (sizes)".
    """

    sizes: tuple[int, ...]
    fallback: int | None
    clash: tuple[str, ...] = ()


def _mha(plan: SpecPlan) -> tuple[int, ...]:
    server = plan.server
    is_long = server.flashinfer >= _LONG_MHA and server.equal_dims
    return (16, 32, 64, 128) if is_long and not server.is_latent else (16, 32, 64)


def _fa4(plan: SpecPlan) -> tuple[int, ...]:
    is_bound = plan.server.arch == "sm100" and plan.is_linear
    return (128,) if is_bound and not plan.server.is_latent else _ANY


def _xpu(plan: SpecPlan) -> tuple[int, ...]:
    return (16, 32, 64, 128) if plan.server.is_latent else (64, 128)


_ROWS = (
    _Row(("flashmla",), lambda _: (64,), 64),
    _Row(("cutlass_mla",), lambda _: (128,), 128),
    _Row(BLACKWELL_MLA, lambda _: (32, 64), 64),
    _Row(("trtllm_mha",), _mha, 64),
    _Row(("hpc_ops",), lambda _: (64,), 64),
    _Row(("fa4",), _fa4, 128),
    _Row(("intel_xpu",), _xpu, 128),
)


def allowed(plan: SpecPlan) -> PageSizes:
    """Return the page sizes that every backend of the plan reads."""
    asks = [(role, name, *_sizes(name, plan)) for role, name in _roles(plan)]
    asks = [ask for ask in asks if ask[2] != _ANY]
    common = set(_ANY).intersection(*(set(ask[2]) for ask in asks))
    if not asks:
        return PageSizes(_ANY, None)
    if not common:
        return PageSizes((), None, _clash(asks))
    fallbacks = [ask[3] for ask in asks if ask[3] in common]
    return PageSizes(tuple(sorted(common)), (fallbacks or [max(common)])[0])


def resolve(plan: SpecPlan) -> int:
    """Return the page size that runs: the plan's where it is read, else the fallback.

    Raises:
        IncompatiblePlan: two backends have no size in common.
    """
    found = allowed(plan)
    if not found.sizes:
        raise errors.IncompatiblePlan(errors.say(*_clash_advice(found)))
    return plan.page_size if plan.page_size in found.sizes else found.fallback


def default(arch: str | None, is_vectorized: bool = False) -> int:
    """Return the page size of a server that was given none.

    `is_vectorized`: ROCm's rows of five dimensions.
    """
    return 64 if arch == "musa" or (arch == "rocm" and is_vectorized) else 1


def _roles(plan: SpecPlan) -> list[tuple[str, str]]:
    """Return the backends that run, by role; the model's own rows are one too.

    A draft's backend is nobody's where nothing drafts with attention of its own.
    """
    found = list(plan.backends.by_role.items())
    if plan.model_kind == "compressed":
        found.append(("model", "compressed"))
    return found


def _sizes(name: str, plan: SpecPlan) -> tuple[tuple[int, ...], int]:
    if name == "compressed":
        return _COMPRESSED, 128
    for each in _ROWS:
        if name in each.backends:
            return each.sizes(plan), each.fallback
    return _ANY, 1


def _clash(asks: list) -> tuple[str, ...]:
    """Return the first two that have no size in common, else all that ask."""
    said = [f"{role} {name} ({listed(sizes[:4])})" for role, name, sizes, _ in asks]
    for first in range(len(asks)):
        for second in range(first + 1, len(asks)):
            if not set(asks[first][2]) & set(asks[second][2]):
                return said[first], said[second]
    return tuple(said)


def _clash_advice(found: PageSizes) -> Advice:
    return Advice(
        " with ".join(found.clash),
        "every backend reads the same pages, and these have no size in common",
        "Choose another backend for one of them",
    )


def _wrong_size(plan: SpecPlan) -> Advice:
    found = allowed(plan)
    names = listed(f"{role} {name}" for role, name in _roles(plan))
    return Advice(
        f"page_size = {plan.page_size} with {names}",
        f"they read pages of {listed(found.sizes[:8])} together; a server would take "
        f"{found.fallback} in its place",
        f"Use page_size = {found.fallback}",
    )


GATES = (
    Gate(
        "page sizes in common",
        applies=lambda plan: bool(_roles(plan)),
        allows=lambda plan: bool(allowed(plan).sizes),
        advice=lambda plan: _clash_advice(allowed(plan)),
    ),
    Gate(
        "page size",
        applies=lambda plan: bool(_roles(plan)) and bool(allowed(plan).sizes),
        allows=lambda plan: plan.page_size in allowed(plan).sizes,
        advice=_wrong_size,
    ),
)
