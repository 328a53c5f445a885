"""Config: a TOML file, the environment and --set become the facts of one engine.

The law: what may be set is declared by a frozen dataclass, once, with its default; this
room only loads and connects. Whatever is not understood is refused (`kvmem.settings`).

    config = load("configs/models/smollm2.toml", ["topology.tp=3"])
    config.budget().groups[0].pages        # no device is touched
    engine = config.engine()

`load` reads any other dataclass too: an experiment declares its own.
"""

import dataclasses
import functools
import os
import pathlib
import weakref
from collections.abc import Mapping, Sequence
from typing import Literal

from kvmem import budget, canonical, errors, geometry, serve, settings, store
from kvmem.budget import Budget, Limit
from kvmem.geometry import LifecycleGroup, Topology
from kvmem.model import page_rows, presets
from kvmem.model.loaded import LoadedModel
from kvmem.model.partition import Partition
from kvmem.model.spec import ModelSpec
from kvmem.serve import ServeConfig
from kvmem.settings import Nbytes, Override, Setting
from kvmem.store import HostTier, RecordStore, TieredStore

__all__ = ["Config", "ModelConfig", "PoolConfig", "ServeConfig", "StoreConfig"]
__all__ += ["explain", "load"]

WeightDType = Literal["float32", "float16", "bfloat16"]
DType = Literal["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Where a model comes from, and what it and its cache are kept in.

    Args:
        source: a preset's name, a .gguf file, a checkpoint folder, or (to plan only) a
            config.json.
        dtype: dtype of the weights; None: the checkpoint's own, else float32.
        kv_dtype: dtype of cached keys and values; None: the checkpoint's own, else
            bfloat16.
    """

    source: str
    dtype: WeightDType | None = None
    kv_dtype: DType | None = None

    def __post_init__(self):
        settings.settle(self)
        if not self.source.strip():
            raise errors.ConfigError(
                errors.say(
                    f"model.source = {self.source!r}",
                    "a model comes from somewhere",
                    f"Give a path, or one of the presets {', '.join(presets.PRESETS)}",
                )
            )

    def weight_dtype(self) -> str:
        """Return the dtype that the weights are loaded in."""
        return self.dtype or presets.declared_dtype(self.source) or "float32"

    def cache_dtype(self) -> str:
        """Return the dtype that keys and values are cached in."""
        return self.kv_dtype or presets.declared_dtype(self.source) or "bfloat16"


@dataclasses.dataclass(frozen=True)
class PoolConfig:
    """How pages are made, and what the pools of one rank may take.

    Several limits may stand together: the smallest wins, and the plan names it.

    Args:
        page_size: tokens of a page.
        order: page order, a name or axes outermost first.
        memory: bytes that the pools may take on each rank.
        memory_total: bytes for all ranks together.
        device_memory: bytes of one rank's device, weights included.
        reserve: bytes of device_memory that are kept for other things.
        fraction: share that pools may take of what weights and reserve leave.
        machine_memory: bytes of the one machine that all ranks share.
        pages: a cap in pages.
        poison: fill fresh pools with NaN bytes.
        checked: check every law of the books after every step.
        certified: prove at start that pages become the canonical records they should.
    """

    page_size: int = 16
    order: str = "head_major"
    memory: Nbytes | None = None
    memory_total: Nbytes | None = None
    device_memory: Nbytes | None = None
    reserve: Nbytes = Nbytes(0)
    fraction: float = 1.0
    machine_memory: Nbytes | None = None
    pages: int | None = None
    poison: bool = False
    checked: bool = False
    certified: bool = False

    def __post_init__(self):
        settings.settle(self)
        geometry.envelope.parse_order(self.order)
        _require_positive(page_size=self.page_size, pages=self.pages)
        idle = []
        if self.device_memory is None:
            idle += ["reserve"] * bool(self.reserve)
            idle += ["fraction"] * (self.fraction != 1.0)
        if self.machine_memory is not None and self.memory is None:
            idle.append("machine_memory")
        if idle:
            raise errors.ConfigError(
                errors.say(
                    f"{', '.join(idle)} alone",
                    "reserve and fraction are of device_memory, and machine_memory "
                    "is shared by ranks that take memory each",
                    "Give device_memory or memory too",
                )
            )

    def limits(self, topology: Topology, weight_nbytes: int) -> tuple[Limit, ...]:
        """Return every cap on the bytes of one rank's pools, () when none is set.

        Args:
            topology: the ranks that share the cache.
            weight_nbytes: bytes of one rank's weights.
        """
        limits = []
        if self.memory is not None and self.machine_memory is not None:
            limits.append(
                budget.rank_limit("memory", self.memory, topology, self.machine_memory)
            )
        elif self.memory is not None:
            limits.append(budget.limit("memory", self.memory))
        if self.memory_total is not None:
            limits.append(
                budget.total_limit("memory_total", self.memory_total, topology)
            )
        if self.device_memory is not None:
            limits += self._device_limits(self.device_memory, weight_nbytes)
        return tuple(limits)

    def _device_limits(self, nbytes: int, weight_nbytes: int) -> list[Limit]:
        """Return what a device leaves, and the share of it if one is set."""
        left = budget.device_limit("device_memory", nbytes, weight_nbytes, self.reserve)
        if self.fraction == 1.0:
            return [left]
        return [left, budget.fraction_limit("fraction", left.nbytes, self.fraction)]


@dataclasses.dataclass(frozen=True)
class StoreConfig:
    """Where token records are kept.

    Args:
        root: the store's folder, or s3://bucket/prefix; None: nothing outlives the
            process.
        chunk_tokens: tokens of a chunk; a property of the root.
        read_only: look records up and write none; readers share a root.
        max_nbytes: bytes that a folder's files of this model and format may take.
        host_memory: bytes of RAM in front of the root, once for all ranks; without a
            root, RAM alone.
        host_kind: memory of the RAM tier, pinned_host where the backend has it.
        endpoint: address of an s3:// root's server; None: Amazon's.
        region: region of an s3:// root's bucket; None: the environment's.
    """

    root: str | None = None
    chunk_tokens: int = 16
    read_only: bool = False
    max_nbytes: Nbytes | None = None
    host_memory: Nbytes | None = None
    host_kind: Literal["pageable", "pinned_host"] = "pageable"
    endpoint: str | None = None
    region: str | None = None

    def __post_init__(self):
        settings.settle(self)
        _require_positive(
            chunk_tokens=self.chunk_tokens,
            max_nbytes=self.max_nbytes,
            host_memory=self.host_memory,
        )
        if self.host_memory is None and self.host_kind != "pageable":
            raise errors.ConfigError(
                errors.say(
                    f"host_kind = {self.host_kind!r} alone",
                    "it is the kind of host_memory",
                    "Give store.host_memory too",
                )
            )
        store.check_options(
            self.root,
            max_nbytes=self.max_nbytes,
            endpoint=self.endpoint,
            region=self.region,
        )

    def open(self, model: LoadedModel, group: LifecycleGroup) -> RecordStore | None:
        """Open the tiers that are set, None without any.

        A writer leaves beside the segments what both ids stand for.
        """
        if self.root is None and self.host_memory is None:
            return None  # without digesting the model
        facts = {
            "model_id": model.model_id,
            "format_id": canonical.format_id([group]),
            "record_nbytes": group.record_nbytes,
            "chunk_tokens": self.chunk_tokens,
        }
        host = None
        if self.host_memory is not None:
            host = HostTier(self.host_memory, memory=self.host_kind, **facts)
        if self.root is None:
            return host
        kept = store.open_root(
            self.root,
            **facts,
            read_only=self.read_only,
            max_nbytes=self.max_nbytes,
            endpoint=self.endpoint,
            region=self.region,
        )
        if kept.writable:
            try:
                store.explain(kept, model.facts, canonical.format_fields([group]))
            except BaseException:
                kept.close()
                raise
        return kept if host is None else TieredStore(host, kept)


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that one engine is made from.

    Args:
        model: the model that answers.
        draft: a draft model, whose pool shares the budget.
        topology: ranks that share the cache.
        pool: pages and their budget.
        serve: the step loop.
        store: token records in RAM, on disk or in a bucket.
    """

    model: ModelConfig
    draft: ModelConfig | None = None
    topology: Topology = Topology()
    pool: PoolConfig = dataclasses.field(default_factory=PoolConfig)
    serve: ServeConfig = dataclasses.field(default_factory=ServeConfig)
    store: StoreConfig = dataclasses.field(default_factory=StoreConfig)

    def __post_init__(self):
        settings.settle(self)

    @functools.cached_property
    def spec(self) -> ModelSpec:
        """The facts of the model, read from its file."""
        return presets.read_spec(self.model.source)

    @property
    def partition(self) -> Partition:
        """Which weights each rank holds; token shards hold the same ones."""
        return Partition(self.spec, Topology(tp=self.topology.tp))

    @property
    def weight_nbytes(self) -> int:
        """Bytes of one rank's weights, padding and replicas included."""
        item = geometry.np_dtype(self.model.weight_dtype()).itemsize
        return self.partition.num_elements * item

    def groups(self) -> tuple[LifecycleGroup, ...]:
        """Return the lifecycle groups of the model."""
        layers = self.spec.layer_specs(self.model.cache_dtype())
        return geometry.group_layers(layers, self.pool.page_size)

    def draft_group(self) -> LifecycleGroup | None:
        """Return the lifecycle group of the draft, None without one."""
        if self.draft is None:
            return None
        spec = presets.read_spec(self.draft.source)
        layers = spec.layer_specs(self.draft.cache_dtype())
        (group,) = geometry.group_layers(layers, self.pool.page_size, domain="draft")
        return group

    def budget(self) -> Budget:
        """Return the budget of each rank; no device is touched.

        Raises:
            ConfigError: neither a limit in bytes nor a number of pages is set.
            IncompatiblePlan: the topology does not fit the model, or pools and host
                tier not the machine, or page ids do not tell so many pages apart.
            OutOfPages: the limits do not hold one page.
        """
        limits = self.pool.limits(self.topology, self.weight_nbytes)
        if not limits and self.pool.pages is None:
            raise errors.ConfigError(
                errors.say(
                    "a pool without a size",
                    "pages come out of a number of bytes",
                    'Give pool.memory, for example "2GiB", or pool.pages',
                )
            )
        solved = self._solve(limits)
        if self.store.host_memory is None:
            return solved
        host = budget.host_term(
            self.store.host_memory, self.topology, solved, self.pool.machine_memory
        )
        return dataclasses.replace(solved, host_terms=(host,))

    def engine(self, model: LoadedModel | None = None) -> "serve.Engine":
        """Return an engine that serves the model; loads its weights and starts jax.

        The store that it opens is closed by `engine.close()`, when the engine is gone,
        or at once if no engine can be made.

        Args:
            model: the same model already loaded, None to load it here.

        Raises:
            IncompatiblePlan: what this version plans and does not serve, all at once.
        """
        self._require_served()
        solved = self.budget()
        if model is None:
            model = presets.load(self.model.source, self.model.weight_dtype())
        (group,) = self.groups()
        store = self.store.open(model, group)
        try:
            engine = serve.Engine(
                model,
                group,
                solved,
                self.topology,
                order=self.pool.order,
                config=self.serve,
                store=store,
                poison=self.pool.poison,
                checked=self.pool.checked,
                certified=self.pool.certified,
            )
        except BaseException:
            if store is not None:
                store.close()
            raise
        if store is not None:
            weakref.finalize(engine, store.close)
        return engine

    def _require_served(self) -> None:
        """Refuse what can be planned and not run, before any weight is read."""
        floats, longest = page_rows.FLOATS, self.serve.max_length
        cached, weights = self.model.cache_dtype(), self.model.weight_dtype()
        faults = []
        if self.draft is not None:
            faults.append(
                (
                    f"draft.source = {self.draft.source!r}",
                    "this version budgets a draft and does not run one",
                    "leave [draft] out",
                )
            )
        if self.topology.dcp > 1:
            faults.append(
                (
                    f"topology.dcp = {self.topology.dcp}",
                    "this version plans token shards and does not run them",
                    "set topology.dcp to 1",
                )
            )
        if cached not in floats:
            law = f"attention reads pages of {', '.join(floats)}"
            cure = f"set model.kv_dtype to {floats[1]}"
            faults.append((f"keys and values in {cached}", law, cure))
        if weights not in floats:
            law = f"weights are computed with in {', '.join(floats)}"
            cure = f"set model.dtype to {floats[1]}"
            faults.append((f"weights in {weights}", law, cure))
        if longest > self.spec.max_position:
            law = f"{self.spec.name} knows positions up to {self.spec.max_position}"
            cure = f"set serve.max_length to {self.spec.max_position} or less"
            faults.append((f"serve.max_length = {longest}", law, cure))
        if faults:
            asked, laws, cures = (", ".join(part) for part in zip(*faults, strict=True))
            cure = f"{cures[0].upper()}{cures[1:]}, or only plan (`kvmem plan`)"
            raise errors.IncompatiblePlan(
                errors.say(f"an engine with {asked}", laws, cure)
            )

    def _solve(self, limits: tuple[Limit, ...]) -> Budget:
        return budget.solve(
            self.groups(),
            self.topology,
            limits,
            order=self.pool.order,
            draft=self.draft_group(),
            max_pages=self.pool.pages,
        )


def load[T](
    path: str | pathlib.Path | None,
    overrides: Sequence[str | Override] = (),
    env: Mapping[str, str] = os.environ,
    kind: type[T] = Config,
) -> T:
    """Return the config that a TOML file, the environment and overrides spell.

    Args:
        path: a TOML file; None: only environment and overrides.
        overrides: "a.b=c" each; the last one of a key wins.
        env: KVMEM_A__B sets a.b.
        kind: the dataclass to load.

    Raises:
        ConfigError: every fault at once.
    """
    return settings.read(kind, path, overrides, env).value


def explain(
    path: str | pathlib.Path | None,
    overrides: Sequence[str | Override] = (),
    env: Mapping[str, str] = os.environ,
    kind: type = Config,
) -> tuple[Setting, ...]:
    """Return each value of the effective config with its source."""
    return settings.read(kind, path, overrides, env).settings


def _require_positive(**values: int | None) -> None:
    """Refuse counts below one, all of a table at once."""
    low = [f"{k} = {v}" for k, v in values.items() if v is not None and v < 1]
    if low:
        raise errors.ConfigError(
            errors.say(", ".join(low), "counts start at one", "Give an integer >= 1")
        )
