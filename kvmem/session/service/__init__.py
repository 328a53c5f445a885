"""Sessions over HTTP: the verbs of a principal, for whoever holds a key of its user.

    kvmem sessions keys add --root DIR --account lab --user ann
    kvmem sessions serve --root DIR

The law: the same contract as in process. A key is one user, an actor is a header that
touches recall and capture alone, and an answer is given after what it acknowledges is
on the disk. Needs the extra `server`.
"""

from kvmem.errors import say

try:
    import starlette  # noqa: F401
    import uvicorn  # noqa: F401
except ImportError as missing:
    raise ImportError(
        say(
            "sessions over HTTP",
            f"{missing.name} is not installed",
            'Install the extra: pip install "kvmem[server]"',
        )
    ) from missing

from kvmem.session.service.app import create_app
from kvmem.session.service.limits import Limits
from kvmem.session.service.serve import serve

__all__ = ["Limits", "create_app", "serve"]
