"""Blending: text that was computed once, used again at any place of another text.

A text's token records are kept; where its tokens stand again, at any offset, its keys
are turned to the new place and a share of its tokens is computed anew, those that the
text before them matters to most (CacheBlend). The law: what is not found is always
computed, what cannot be turned is never reused, and a blended page is never taken for
an exact one: neither the prefix cache nor a store gets it.

    library.find(tokens)                     # match: where, and which text
    select.choose(...)                       # which tokens are computed anew
    recompute.Recompute(...)                 # the pass, in the pool's own pages
    gate.objections(groups, config)          # which models may not, and why

No jax is loaded before `kvmem.blend.recompute` is imported.
"""

from kvmem.blend.gate import Verdict, objections, require, require_passed
from kvmem.blend.match import Library, Run
from kvmem.blend.settings import BlendConfig

__all__ = ["BlendConfig", "Library", "Run", "Verdict"]
__all__ += ["objections", "require", "require_passed"]
