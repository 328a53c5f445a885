"""Plans of speculative decoding: facts alone, which rule sets judge.

A draft proposes tokens and the target verifies them in one step, so a plan says who
proposes, how wide and how far, and on which pools. `Server` and `Backends` hold what
rule sets of other stacks ask about; kvmem's own reads neither. The law: a plan is
hashable facts and refuses only what has no meaning in any rule set; whether its facts
go together is `check`'s to say.

    SpecPlan("mtp", steps=3).num_drafted                  # 3: a linear chain
    SpecPlan("frozen_kv", topk=2, steps=3).num_drafted    # 6: a tree of two chains
"""

import dataclasses
from collections.abc import Mapping

from kvmem import errors

__all__ = ["MODEL_KINDS", "POOL_KINDS", "STEPS", "Backends", "Server", "SpecPlan"]

POOL_KINDS = ("unified", "split")
MODEL_KINDS = ("dense", "window", "state", "window_state", "compressed")
STEPS = 4  # draft steps where a plan names none


@dataclasses.dataclass(frozen=True)
class Backends:
    """Kernels of a server by its own names; None where it was not told.

    Args:
        attention: of the target; prefill and decode have it unless they name another.
        prefill, decode: of the target.
        draft: of the draft's attention; unset it is the decode backend.
        linear_prefill, linear_decode: of linear attention layers.
        states: of recurrent layers.
    """

    attention: str | None = None
    prefill: str | None = None
    decode: str | None = None
    draft: str | None = None
    linear_prefill: str | None = None
    linear_decode: str | None = None
    states: str | None = None

    @property
    def of_prefill(self) -> str | None:
        """The backend that prefill runs on."""
        return self.prefill or self.attention

    @property
    def of_decode(self) -> str | None:
        """The backend that decode runs on."""
        return self.decode or self.attention

    @property
    def of_draft(self) -> str | None:
        """The backend that the draft's attention runs on."""
        return self.draft or self.of_decode

    @property
    def by_role(self) -> Mapping[str, str]:
        """Every attention backend that runs, by the role that it runs in.

        `attention` stands for the target where a role does not override it.
        """
        found = {
            "target": self.attention,
            "prefill": self.prefill,
            "decode": self.decode,
            "draft": self.draft,
        }
        if self.prefill and self.decode:  # nothing of the target is left to it
            found["target"] = None
        return {role: name for role, name in found.items() if name is not None}


@dataclasses.dataclass(frozen=True)
class Server:
    """Facts of a serving stack that kvmem's own rules do not read.

    Args:
        dp: ranks of data-parallel attention.
        pp: pipeline stages.
        cp: ranks of prefill context parallelism.
        role: "prefill" or "decode" of a server that does one of both; None: both.
        transfer: how a prefill server sends pages.
        radix: whether prefixes are kept for reuse.
        host_cache: name of the cache in host memory, None without one.
        storage: whether that cache has a third, shared level.
        compaction: "lazy" or "eager".
        prefill_graph: "default", "on" or "off".
        hisparse: whether index keys have host copies.
        ring_states: whether states of drafts are kept in a ring a slot (ReplaySSM).
        dp_lm_head: whether the head of the model is data-parallel too.
        a2a: how experts exchange tokens, None without an exchange.
        arch: of the device: "sm90", "sm100", "rocm", "musa", "xpu".
        kv_dtype: of the cache.
        is_latent: whether attention is over latents (MLA).
        equal_dims: whether keys are as wide as values.
        flashinfer: its version.
        block: tokens that a block draft proposes at once.
        assistant: whether the draft is made to read the target's keys (Gemma 4).
        draft_window: window of the draft's layers, None where it has none.
        draft_all_windows: whether every layer of the draft has it.
        draft_causal: whether the draft's attention is causal.
        overlap: whether the next step is prepared while one runs.
        row_width: tokens that a row of the request table is wider than the context;
            None: the default headroom.
    """

    dp: int = 1
    pp: int = 1
    cp: int = 1
    role: str | None = None
    transfer: str | None = None
    radix: bool = True
    host_cache: str | None = None
    storage: bool = False
    compaction: str = "lazy"
    prefill_graph: str = "default"
    hisparse: bool = False
    ring_states: bool = False
    dp_lm_head: bool = False
    a2a: str | None = None
    arch: str | None = None
    kv_dtype: str = "bfloat16"
    is_latent: bool = False
    equal_dims: bool = True
    flashinfer: tuple[int, ...] = (0, 6, 12)
    block: int | None = None
    assistant: bool = False
    draft_window: int | None = None
    draft_all_windows: bool = False
    draft_causal: bool = True
    overlap: bool = True
    row_width: int | None = None

    def __post_init__(self):
        _require_counts(
            self, "dp", "pp", "cp", "block", "draft_window", "row_width", of="server"
        )
        _require_one_of("server.role", self.role, (None, "prefill", "decode"))
        _require_one_of("server.compaction", self.compaction, ("lazy", "eager"))
        graphs = ("default", "on", "off")
        _require_one_of("server.prefill_graph", self.prefill_graph, graphs)


@dataclasses.dataclass(frozen=True)
class SpecPlan:
    """What drafts, how wide and how far, on which pools.

    Args:
        algorithm: who proposes, by the name that a rule set knows; None: nobody.
        topk: tokens proposed for each place; None or 1: a linear chain.
        steps: times that the draft runs for one verification; None: `STEPS`.
        draft_tokens: tokens that one step verifies beside the sequence's own; None:
            as many as the chains hold. Rule sets count it as their stack does.
        page_size: tokens of a page.
        pool_kind: "unified": one pool for every kind of state; "split": one for each.
        model_kind: what the target keeps besides full attention: "dense" nothing,
            "window", "state", "window_state", or "compressed" rows of many tokens.
        tp: head shards.
        dcp: token shards.
        max_batch: sequences that run at once.
        max_length: tokens of the longest sequence.
        backends, server: for rule sets of other stacks.
    """

    algorithm: str | None = None
    topk: int | None = None
    steps: int | None = None
    draft_tokens: int | None = None
    page_size: int = 16
    pool_kind: str = "unified"
    model_kind: str = "dense"
    tp: int = 1
    dcp: int = 1
    max_batch: int = 8
    max_length: int = 2048
    backends: Backends = dataclasses.field(default_factory=Backends)
    server: Server = dataclasses.field(default_factory=Server)

    def __post_init__(self):
        _require_counts(
            self,
            *("topk", "steps", "draft_tokens", "page_size", "tp", "dcp"),
            *("max_batch", "max_length"),
        )
        _require_one_of("pool_kind", self.pool_kind, POOL_KINDS)
        _require_one_of("model_kind", self.model_kind, MODEL_KINDS)

    @property
    def is_linear(self) -> bool:
        """Say whether one token at most is proposed for each place."""
        return self.topk in (None, 1)

    @property
    def width(self) -> int:
        """Tokens proposed for each place: topk, or 1."""
        return self.topk or 1

    @property
    def has_states(self) -> bool:
        """Say whether the target has recurrent layers."""
        return self.model_kind in ("state", "window_state")

    @property
    def has_windows(self) -> bool:
        """Say whether the target has sliding windows."""
        return self.model_kind in ("window", "window_state")

    @property
    def num_drafted(self) -> int:
        """Tokens that are proposed for a sequence in one step; 0 without a draft."""
        if self.algorithm is None:
            return 0
        return self.draft_tokens or self.width * (self.steps or STEPS)

    @property
    def num_verified(self) -> int:
        """Rows of a sequence that one step of the target computes."""
        return self.num_drafted + 1


def _require_counts(owner: object, *names: str, of: str = "speculative") -> None:
    """Refuse counts that are no integer of at least one, all at once."""
    values = {name: getattr(owner, name) for name in names}
    faults = [
        f"{of}.{name} = {value!r}"
        for name, value in values.items()
        if value is not None and (type(value) is not int or value < 1)
    ]
    if faults:
        raise errors.ConfigError(
            errors.say(", ".join(faults), "counts start at one", "Give an integer >= 1")
        )


def _require_one_of(name: str, value: object, known: tuple) -> None:
    if value not in known:
        raise errors.ConfigError(
            errors.say(
                f"{name} = {value!r}",
                "it is one of the known kinds",
                f"Use one of {', '.join(map(repr, known))}",
            )
        )
