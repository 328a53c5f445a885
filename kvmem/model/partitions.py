"""The partition of any model: which of its weights each rank holds.

The law: a spec's type says which decoder computes it, and so how it is shared out.

    partition_of(model.spec, Topology(tp=2)).num_elements      # of one rank

No jax: the plan of a model is read without a device.
"""

from kvmem.geometry import Topology
from kvmem.model.dflash import DFlashPartition, DFlashSpec
from kvmem.model.hybrid.partition import HybridPartition
from kvmem.model.hybrid.spec import HybridSpec
from kvmem.model.mtp import MtpPartition, MtpSpec
from kvmem.model.partition import Partition
from kvmem.model.spec import ModelSpec

__all__ = ["AnyPartition", "AnySpec", "partition_of"]

AnySpec = ModelSpec | HybridSpec
AnyPartition = Partition | HybridPartition


def partition_of(spec: AnySpec, topology: Topology) -> AnyPartition:
    """Return the share of one rank.

    Raises:
        IncompatiblePlan: heads that this topology cannot divide, or token shards.
    """
    made = {
        ModelSpec: Partition,
        HybridSpec: HybridPartition,
        MtpSpec: MtpPartition,
        DFlashSpec: DFlashPartition,
    }
    return made[type(spec)](spec, topology)
