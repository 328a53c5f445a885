"""Which weights of a hybrid each rank holds.

Query heads, value heads of states, MLP rows and vocabulary rows are shared out; KV
heads and key heads too, or replicated where ranks are a multiple of them; latents,
index keys and norms stand on every rank. The law: all ranks' arrays have equal shapes.

    HybridPartition(spec, Topology(tp=2)).rank_params(params, rank=1)

No jax: the plan of a model is read without a device.
"""

import dataclasses
import functools
from collections.abc import Mapping

import numpy as np

from kvmem.errors import IncompatiblePlan, say
from kvmem.geometry import Topology
from kvmem.model.hybrid.spec import HybridSpec
from kvmem.model.partition import Padding

__all__ = ["HybridPartition"]


@dataclasses.dataclass(frozen=True)
class HybridPartition:
    """The share of one rank.

    Raises:
        IncompatiblePlan: heads that this topology cannot divide, or token shards.
    """

    spec: HybridSpec
    topology: Topology = Topology()

    def __post_init__(self):
        if self.topology.dcp > 1:
            raise IncompatiblePlan(
                say(
                    f"weights cut for {self.topology.dcp} token shards",
                    "ranks that share the tokens of a sequence hold the same weights",
                    f"Cut them for Topology(tp={self.topology.tp})",
                )
            )
        heads = sorted({mixer.heads for mixer in self.spec.mixers})
        tp = self.topology.tp
        if any(count % tp for count in heads):
            sizes = [t for t in range(1, heads[0] + 1) if not any(h % t for h in heads)]
            raise IncompatiblePlan(
                say(
                    f"{' and '.join(map(str, heads))} heads on TP {tp}",
                    "every rank holds equally many whole heads of each layer",
                    f"Use TP {', '.join(map(str, sizes))}",
                )
            )
        for layer in self.spec.layer_specs():
            for field in layer.fields:
                self.topology.require(field)

    @functools.cached_property
    def _weights(self):
        return self.spec.weights()

    @property
    def vocab(self) -> int:
        """Rows of the embedding, and logits, on a rank."""
        return -(-self.spec.vocab // self.topology.tp)

    @property
    def paddings(self) -> tuple[Padding, ...]:
        """What was padded, () when every dimension divides."""
        tp = self.topology.tp
        sizes = {"mlp": self.spec.mlp, "vocab": self.spec.vocab}
        made = (Padding(k, size, -(-size // tp) * tp) for k, size in sizes.items())
        return tuple(padding for padding in made if padding.padded != padding.size)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name every array of one rank with its shape, `[out, in]`."""
        return {
            name: weight.rank_shape(self.topology)
            for name, weight in self._weights.items()
        }

    @property
    def num_elements(self) -> int:
        """Elements of all the arrays of one rank, padding and replicas included."""
        return sum(int(np.prod(shape)) for shape in self.shapes().values())

    def is_split(self, name: str) -> bool:
        """Say whether ranks hold different parts of a tensor."""
        return self._weights[name].axis is not None

    def rank_params(
        self, params: Mapping[str, np.ndarray], rank: int
    ) -> dict[str, np.ndarray]:
        """Cut one rank's arrays out of a whole model's; the names stay.

        Args:
            params: the tensors of `spec.parameters()`.
            rank: whose share.
        """
        return {
            name: weight.share(self.topology, params[name], rank)
            for name, weight in self._weights.items()
        }
