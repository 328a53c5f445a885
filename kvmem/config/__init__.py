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

from kvmem import budget, errors, geometry, manage, serve, settings
from kvmem.blend import BlendConfig, objections, require_passed
from kvmem.budget import Budget, Limit
from kvmem.config import drafting
from kvmem.config.model import ModelConfig
from kvmem.config.pool import PoolConfig
from kvmem.config.speculative import SpeculativeConfig
from kvmem.config.store import StoreConfig
from kvmem.geometry import LifecycleGroup, Term, Topology
from kvmem.model import page_rows
from kvmem.model.cache_facts import CacheSpec
from kvmem.model.loaded import LoadedModel
from kvmem.model.partitions import AnyPartition, AnySpec, partition_of
from kvmem.serve import ServeConfig
from kvmem.settings import Override, Setting
from kvmem.speculative import SpecPlan, capacity, check, place

__all__ = [
    "BlendConfig",
    "Config",
    "ModelConfig",
    "PoolConfig",
    "ServeConfig",
    "SpeculativeConfig",
]
__all__ += ["StoreConfig", "explain", "load"]


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that one engine is made from.

    Args:
        model: the model that answers.
        draft: a draft model, whose pool shares the budget.
        speculative: who drafts, how wide and how far.
        topology: ranks that share the cache.
        pool: pages and their budget.
        serve: the step loop.
        store: token records in RAM, on disk or in a bucket.
        blend: reuse text that was computed once at any place of a prompt; None: reuse
            prefixes alone.
    """

    model: ModelConfig
    draft: ModelConfig | None = None
    speculative: SpeculativeConfig = dataclasses.field(
        default_factory=SpeculativeConfig
    )
    topology: Topology = Topology()
    pool: PoolConfig = dataclasses.field(default_factory=PoolConfig)
    serve: ServeConfig = dataclasses.field(default_factory=ServeConfig)
    store: StoreConfig = dataclasses.field(default_factory=StoreConfig)
    blend: BlendConfig | None = None

    def __post_init__(self):
        settings.settle(self)

    @functools.cached_property
    def spec(self) -> AnySpec | CacheSpec:
        """The facts of the model, read from its file; those of its cache, at least."""
        return self.model.spec()

    @property
    def partition(self) -> AnyPartition | None:
        """Which weights each rank holds; token shards hold the same ones.

        None where only the cache is known.
        """
        if isinstance(self.spec, CacheSpec):
            return None
        return partition_of(self.spec, Topology(tp=self.topology.tp))

    @property
    def weight_nbytes(self) -> int | None:
        """Bytes of one rank's weights, padding and replicas included, if known."""
        if self.partition is None:
            return None
        item = geometry.np_dtype(self.model.weight_dtype()).itemsize
        return self.partition.num_elements * item

    @property
    def draft_weight_nbytes(self) -> int | None:
        """Bytes of one rank's weights that are the draft's own, if known.

        What it shares with the target is among that one's.
        """
        if self.partition is None:
            return None
        return drafting.own_weight_nbytes(
            self.speculative, self.model, self.spec, self.draft, self.topology
        )

    def groups(self) -> tuple[LifecycleGroup, ...]:
        """Return the lifecycle groups of the model.

        A window that no text of serve.max_length outgrows is full attention, here and
        in the store: its layers' records of all tokens are then one row with those of
        full attention, and not a part of their own that keeps the trailing ones. So the
        format id, which names the parts, is another on the two sides of a window's
        length, where neither could read the other's records, and the same at all
        lengths between two windows.
        """
        layers = self.model.layer_specs(self.spec)
        return geometry.group_layers(
            layers, self.pool.page_size, max_length=self.serve.max_length
        )

    def draft_groups(self) -> tuple[LifecycleGroup, ...]:
        """Return the lifecycle groups of the draft, () where it keeps nothing.

        Raises:
            ConfigError: a draft model for an algorithm that has its layers from the
                target.
        """
        layers = drafting.layers_of(self.speculative, self.model, self.spec, self.draft)
        if not layers:
            return ()
        return geometry.group_layers(layers, self.pool.page_size, domain="draft")

    def spec_plan(self) -> SpecPlan:
        """Return the facts of drafting, which rule sets judge."""
        return self.speculative.plan(
            self.groups(),
            page_size=self.pool.page_size,
            pool_kind=self.pool.kind,
            tp=self.topology.tp,
            dcp=self.topology.dcp,
            max_batch=self.serve.max_batch,
            max_length=self.serve.max_length,
        )

    def manager(self) -> manage.Selection:
        """Return which manager divides the pools among the groups, and why."""
        engines = "none"
        if self.draft is not None or self.speculative.algorithm is not None:
            engines = "two" if self.speculative.algorithm == "two_engine" else "one"
        plan = manage.Plan(self.spec.name, engines)
        placed = place(self.spec_plan(), self.groups(), self.draft_groups())
        preference = manage.preference_of(*placed.joint)
        return manage.select(self.pool.manager, preference, plan)

    def budget(self) -> Budget:
        """Return the budget of each rank; no device is touched.

        Raises:
            ConfigError: neither a limit in bytes nor a number of pages is set.
            IncompatiblePlan: the topology does not fit the model, or pools and host
                tier not the machine, or page ids do not tell so many pages apart.
            OutOfPages: the limits do not hold one page.
        """
        weights = self.weight_nbytes, self.draft_weight_nbytes
        known = None if None in weights else sum(weights)
        limits = self.pool.limits(self.topology, known)
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

    def engine(
        self, model: LoadedModel | None = None, gated: bool = True
    ) -> "serve.Engine":
        """Return an engine that serves the model; loads its weights and starts jax.

        The store that it opens is closed by `engine.close()`, when the engine is gone,
        or at once if no engine can be made.

        Args:
            model: the same model already loaded, None to load it here.
            gated: whether an engine that blends wants the record of the check that its
                model passed; False to make that check.

        Raises:
            IncompatiblePlan: what this version plans and does not serve, all at once;
                or a model that is to blend and has not passed its check.
        """
        self._require_served()
        is_gated = gated and self.blend is not None and not self.blend.recomputes_all
        if is_gated:
            require_passed(self.blend, None, self.model.cache_dtype())
        solved = self.budget()
        if model is None:
            model = self.model.load()
        if is_gated:
            require_passed(self.blend, model.model_id, self.model.cache_dtype())
        groups, of_draft = self.groups(), self.draft_groups()
        draft = drafting.draft_of(
            self.spec_plan(),
            self.speculative,
            self.draft,
            model,
            groups=of_draft,
            solved=solved,
            order=self.pool.order,
        )
        small = draft.model if of_draft else None
        store = self.store.open(model, (*groups, *of_draft), small)
        try:
            engine = serve.Engine(
                model,
                groups,
                solved,
                self.topology,
                order=self.pool.order,
                config=self.serve,
                store=store,
                poison=self.pool.poison,
                checked=self.pool.checked,
                certified=self.pool.certified,
                manager=self.manager(),
                rebalance=self.pool.rebalance,
                draft=draft,
                blend=self.blend,
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
        if isinstance(self.spec, CacheSpec):
            asked = f"the model {self.spec.name!r}"
            faults.append((asked, self.spec.refusal, "give a model that runs"))
        plan = self.spec_plan()
        for broken in check(plan):
            asked, law, cure = broken.advice
            faults.append((asked, law, f"{cure[0].lower()}{cure[1:]}"))
        stored = self.draft_groups() if self.store.is_set else ()
        faults += drafting.unserved(plan, self.draft, self.groups(), stored)
        faults += self.store.unserved(self.groups(), stored)
        if cached not in floats:
            law = f"attention reads pages of {', '.join(floats)}"
            cure = f"set model.kv_dtype to {floats[1]}"
            faults.append((f"keys and values in {cached}", law, cure))
        if weights not in floats:
            law = f"weights are computed with in {', '.join(floats)}"
            cure = f"set model.dtype to {floats[1]}"
            faults.append((f"weights in {weights}", law, cure))
        if longest > (self.spec.max_position or longest):
            law = f"{self.spec.name} knows positions up to {self.spec.max_position}"
            cure = f"set serve.max_length to {self.spec.max_position} or less"
            faults.append((f"serve.max_length = {longest}", law, cure))
        faults += self._unserved_groups()
        if self.blend is not None:
            laws = objections(self.groups(), self.blend, self.topology)
            faults += [("a table [blend]", law, "leave [blend] out") for law in laws]
        if faults:
            asked, laws, cures = (", ".join(part) for part in zip(*faults, strict=True))
            cure = f"{cures[0].upper()}{cures[1:]}, or only plan (`kvmem plan`)"
            raise errors.IncompatiblePlan(
                errors.say(f"an engine with {asked}", laws, cure)
            )

    def _unserved_groups(self) -> list[tuple[str, str, str]]:
        """Return what is asked for several groups and served for one only."""
        is_idle = self.draft is not None and self.speculative.algorithm is None
        drafts = () if is_idle else self.draft_groups()  # refused, and not looked for
        joint = place(self.spec_plan(), self.groups(), drafts).joint
        names = ", ".join(group.name for group in joint)
        if names == "full":
            return []
        faults = []
        if self.pool.certified:
            law = "pages of one group of full attention are certified"
            asked = f"pool.certified for the groups {names}"
            faults.append((asked, law, "set pool.certified to false"))
        if self.pool.kind == "split" and len(self.groups()) > 1:
            law = "the groups of an engine share the pages of one pool"
            asked = f'pool.kind = "split" for the groups {names}'
            faults.append((asked, law, 'set pool.kind to "unified"'))
        return faults

    def _solve(self, limits: tuple[Limit, ...]) -> Budget:
        plan = self.spec_plan()
        groups, followers = place(plan, self.groups(), self.draft_groups())
        solved = budget.solve(
            groups,
            self.topology,
            limits,
            order=self.pool.order,
            draft=followers,
            max_pages=self.pool.pages,
            kind=self.pool.kind,
            sequences=self.serve.max_batch,
            max_length=self.serve.max_length,
            step=max(self.serve.prefill_chunk, plan.num_verified),
            window_ratio=self.pool.window_ratio,
            fixed=self._workspaces(plan),
        )
        members = manage.members_of(
            groups, self.topology, self.pool.order, self.pool.kind
        )
        shares, name = self.pool.shares or None, self.manager().name
        self._require_followed(name, len(groups))
        return manage.divide(solved, members, name, shares)

    def _require_followed(self, manager: str, num_groups: int) -> None:
        """Refuse to say when shares follow where they follow nothing."""
        follows = manager == "grouped" and num_groups > 1
        if follows or self.pool.rebalance == manage.Knobs():
            return
        raise errors.ConfigError(
            errors.say(
                f"pool.rebalance for {num_groups} groups of manager {manager!r}",
                "one group has everything, and walls stay where they were put: only "
                "the shares of grouped pools follow the texts that come",
                "Leave [pool.rebalance] out",
            )
        )

    def _workspaces(self, plan: SpecPlan) -> tuple[Term, ...]:
        """Return what drafting holds beside the pools: logits of what is verified, and
        the probabilities that exact rejection compares."""
        vocab = getattr(self.spec, "vocab", None)
        if plan.algorithm is None or vocab is None:
            return ()
        found = (capacity.workspace_term(plan, row_nbytes=4 * vocab),)
        if self.speculative.acceptance == "rejection":
            found += (capacity.rejection_term(plan, row_nbytes=4 * vocab),)
        return found


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
