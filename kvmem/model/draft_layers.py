"""Files of draft layers: what training leaves, and what an engine drafts with.

One safetensors file of the draft's own tensors, and of the token ids that it proposes
where those are not all; embeddings, last norm and head are the target's and are not in
it. A matrix may be stored in int8, each of its rows beside the scale that it is
multiplied by: no element is off by more than half of that. The law: layers know whose
they are. The file names the model id that they were trained behind, and they are loaded
for that model alone: behind another they would propose noise.

    save(path, layers, model, int8=True)
    layers = load(path, model, layers=1)       # as `mtp.draw(model, 1)` makes them
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import safetensors
from safetensors import numpy as safetensors_numpy

from kvmem.errors import FormatMismatch, say
from kvmem.model import draft_spec, mtp, tensor_file
from kvmem.model.loaded import LoadedModel

__all__ = ["load", "save", "words_of"]

Complete = Callable[[LoadedModel, int, Mapping[str, np.ndarray], str], LoadedModel]

_PLAIN, _SCALED = "kvmem draft layers 1", "kvmem draft layers 2"
_SCALE = ".scale"  # f32[N] behind the name of an int8[N, K]
_MOST = 127
_INTEGERS = {"I8": np.dtype(np.int8), "I32": np.dtype(np.int32)}


def save(
    path: str | Path, draft: LoadedModel, target: LoadedModel, int8: bool = False
) -> None:
    """Write the draft's own tensors by one rename.

    Args:
        path: of the file; its folder exists.
        draft: layers for `target`.
        target: whose model id is noted.
        int8: matrices in int8 with a scale a row, and vectors in float32; False: all
            in their own dtype.
    """
    own = draft.spec.own_parameters()
    tensors = {name: np.ascontiguousarray(draft.params[name]) for name in own}
    if int8:
        tensors = _scaled(tensors)
    if draft.spec.words:
        tensors[draft_spec.WORDS] = np.asarray(draft.spec.words, np.int32)
    facts = {"scheme": _SCALED if int8 else _PLAIN, "target": target.model_id}
    scratch = Path(f"{path}.tmp")
    safetensors_numpy.save_file(tensors, scratch, metadata=facts)
    scratch.replace(path)


def load(
    path: str | Path,
    target: LoadedModel,
    layers: int = 1,
    complete: Complete = mtp.with_params,
) -> LoadedModel:
    """Read draft layers for a model, in the dtype of its weights.

    Args:
        path: of a file that `save` wrote.
        target: the model that they draft for.
        layers: how many there are.
        complete: of the kind that they are, from target, layers, tensors and source.

    Raises:
        FormatMismatch: no such file, a damaged one or one of another kind, layers for
            another model, or other tensors than so many layers have.
        IncompatiblePlan: a target without attention.
    """
    return complete(target, layers, _read(Path(path), target), f"of {path}")


def words_of(path: str | Path) -> tuple[int, ...]:
    """Return the token ids that the layers of a file propose, () for all of them; no
    weight is read. Of a file that is not there nothing is known, and () too.

    Raises:
        FormatMismatch: a damaged file.
    """
    if not Path(path).is_file():
        return ()
    tensors = tensor_file.read(Path(path), tensor_file.FLOATS | _INTEGERS)
    words = tensors.get(draft_spec.WORDS, np.empty(0, np.int32))
    return tuple(words.reshape(-1).tolist())


def _read(path: Path, target: LoadedModel) -> dict[str, np.ndarray]:
    """Read a file's tensors in the dtype of a model's weights."""
    if not path.is_file():
        raise FormatMismatch(
            say(
                f"draft layers of {path}",
                "there is no such file",
                "Train some (configs/train_draft.toml), or leave the weights out and "
                "draw them from a seed",
            )
        )
    tensors = tensor_file.read(path, tensor_file.FLOATS | _INTEGERS)
    _require_target(path, target)
    dtype = target.params["model.norm.weight"].dtype
    words = tensors.pop(draft_spec.WORDS, None)
    found = {name: rows.astype(dtype) for name, rows in _whole(path, tensors).items()}
    return found if words is None else found | {draft_spec.WORDS: words}


def _scaled(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return matrices as int8 and their scales, and all else as float32."""
    found = {}
    for name, rows in tensors.items():
        rows = rows.astype(np.float32)
        if rows.ndim == 1:
            found[name] = rows
            continue
        scale = np.abs(rows).max(axis=1) / np.float32(_MOST)
        scale[scale == 0] = 1
        found[name] = np.rint(rows / scale[:, None]).astype(np.int8)
        found[name + _SCALE] = scale
    return found


def _whole(path: Path, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors that a file means: int8 rows are multiplied by their scales.

    Raises:
        FormatMismatch: int8 without a scale for each row, or a scale of nothing.
    """
    scales = {name: rows for name, rows in tensors.items() if name.endswith(_SCALE)}
    found, used = {}, set()
    for name, rows in tensors.items():
        if name in scales:
            continue
        if rows.dtype == np.int8:
            scale = scales.get(name + _SCALE)
            if rows.ndim != 2 or scale is None or scale.shape != rows.shape[:1]:
                raise _odd(path, f"{name} is int8{list(rows.shape)} without its scales")
            used.add(name + _SCALE)
            rows = rows * scale[:, None]
        found[name] = rows
    if idle := sorted(scales.keys() - used):
        raise _odd(path, f"{idle[0]} scales nothing")
    return found


def _odd(path: Path, what: str) -> FormatMismatch:
    return FormatMismatch(
        say(
            f"draft layers of {path}",
            what,
            "Write the file with kvmem.model.draft_layers.save",
        )
    )


def _require_target(path: Path, target: LoadedModel) -> None:
    """Refuse a file of another kind, or layers for another model."""
    with safetensors.safe_open(path, framework="np") as file:
        facts = file.metadata() or {}
    laws = {
        f"the file says {_PLAIN!r} or {_SCALED!r} of itself": facts.get("scheme")
        in (_PLAIN, _SCALED),
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
