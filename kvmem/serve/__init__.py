"""Serving: requests, batches, the step, the engine.

`ServeConfig` and `SamplingParams` are plain facts; the engine brings jax with it, so it
is imported when it is first asked for and a plan can be made without it.
"""

import importlib

from kvmem.serve.buckets import Bucket, Buckets, ServeConfig

__all__ = [
    "Bucket",
    "Buckets",
    "Completion",
    "Delta",
    "Engine",
    "EngineStats",
    "GroupStats",
    "Identity",
    "Image",
    "ManagerStats",
    "Output",
    "ResetReport",
    "SamplingParams",
    "ServeConfig",
    "draft_of",
]

_HOMES = {
    "Engine": "kvmem.serve.engine",
    "Completion": "kvmem.serve.request",
    "Delta": "kvmem.serve.request",
    "EngineStats": "kvmem.serve.stats",
    "GroupStats": "kvmem.serve.balance",
    "Identity": "kvmem.serve.identity",
    "Image": "kvmem.serve.identity",
    "ManagerStats": "kvmem.serve.balance",
    "Output": "kvmem.serve.request",
    "ResetReport": "kvmem.serve.stats",
    "SamplingParams": "kvmem.serve.request",
    "draft_of": "kvmem.serve.draft.make",
}


def __getattr__(name: str) -> object:
    """Return a name of this room whose file is imported on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'kvmem.serve' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
