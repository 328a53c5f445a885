"""Files of draft layers: what training leaves, and what an engine drafts with.

One safetensors file of the draft's own tensors; embeddings, last norm and head are the
target's and are not in it. The law: layers know whose they are. The file names the
model id that they were trained behind, and they are loaded for that model alone: behind
another they would propose noise.

    save(path, layers, model)
    layers = load(path, model, layers=1)       # as `mtp.draw(model, 1)` makes them
"""

from pathlib import Path

import numpy as np
import safetensors
from safetensors import numpy as safetensors_numpy

from kvmem.errors import FormatMismatch, say
from kvmem.model import mtp, tensor_file
from kvmem.model.loaded import LoadedModel

__all__ = ["load", "save"]

_SCHEME = "kvmem draft layers 1"


def save(path: str | Path, draft: LoadedModel, target: LoadedModel) -> None:
    """Write the draft's own tensors, in their own dtype, by one rename.

    Args:
        path: of the file; its folder exists.
        draft: layers for `target`.
        target: whose model id is noted.
    """
    own = draft.spec.own_parameters()
    tensors = {name: np.ascontiguousarray(draft.params[name]) for name in own}
    facts = {"scheme": _SCHEME, "target": target.model_id}
    scratch = Path(f"{path}.tmp")
    safetensors_numpy.save_file(tensors, scratch, metadata=facts)
    scratch.replace(path)


def load(path: str | Path, target: LoadedModel, layers: int = 1) -> LoadedModel:
    """Read draft layers for a model, in the dtype of its weights.

    Args:
        path: of a file that `save` wrote.
        target: the model that they draft for.
        layers: how many there are.

    Raises:
        FormatMismatch: no such file, a damaged one or one of another kind, layers for
            another model, or other tensors than so many layers have.
        IncompatiblePlan: a target whose layers differ.
    """
    path = Path(path)
    if not path.is_file():
        raise FormatMismatch(
            say(
                f"draft layers of {path}",
                "there is no such file",
                "Train some (configs/train_draft.toml), or leave the weights out and "
                "draw them from a seed",
            )
        )
    params = tensor_file.read(path)
    _require_target(path, target)
    dtype = target.params["model.norm.weight"].dtype
    params = {name: np.asarray(rows, dtype) for name, rows in params.items()}
    return mtp.with_params(target, layers, params, f"of {path}")


def _require_target(path: Path, target: LoadedModel) -> None:
    """Refuse a file of another kind, or layers for another model."""
    with safetensors.safe_open(path, framework="np") as file:
        facts = file.metadata() or {}
    laws = {
        f"the file says {_SCHEME!r} of itself": facts.get("scheme") == _SCHEME,
        f"they were trained behind the model {facts.get('target', '')[:12]}, and this "
        f"is {target.model_id[:12]}": facts.get("target") == target.model_id,
    }
    broken = [law for law, holds in laws.items() if not holds]
    if broken:
        raise FormatMismatch(
            say(
                f"draft layers of {path} for {target.source}",
                broken[0],
                "Use layers that were trained for this model",
            )
        )
