"""How a jitted verb is called: once compiled, whatever surrounds the call.

The law: a verb's program depends on its arguments alone. jax also compiles anew for
each mesh context, so a server that warms up outside `jax.set_mesh` and runs inside it
would compile everything twice; a verb called on arrays therefore runs outside any mesh
context (its arguments know their own mesh). Inside jit it joins the caller's program.
"""

from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh

__all__ = ["call", "is_traced"]

_NO_MESH = Mesh(np.empty((), object), ())


def call(verb: Callable, *args: object):
    """Call a jitted `verb` outside any mesh context; inside a transform, as it is."""
    if is_traced(*jax.tree.leaves(args)):
        return verb(*args)
    with jax.set_mesh(_NO_MESH):
        return verb(*args)


def is_traced(*values: object) -> bool:
    """Return whether any of `values` is a tracer, so that we are inside a transform."""
    return any(isinstance(value, jax.core.Tracer) for value in values)
