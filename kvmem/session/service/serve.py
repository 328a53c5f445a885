"""Running the service: one process on one address, until it is told to stop.

The law: what was acknowledged is on the disk, so the process may be killed at any time;
told to stop (SIGTERM, Ctrl-C) it ends the requests that run and takes no more.
"""

import contextlib
import pathlib
import socket
from collections.abc import Callable

import uvicorn

from kvmem.errors import ConfigError, say
from kvmem.session.keys import KeyRing
from kvmem.session.service.app import create_app
from kvmem.session.service.limits import Limits

__all__ = ["serve"]

_STOP_S = 10  # for requests that run when the process is told to stop


def serve(
    store,
    root: pathlib.Path | str,
    host: str = "127.0.0.1",
    port: int = 8350,
    limits: Limits | None = None,
    started: Callable[[str, int], None] | None = None,
) -> None:
    """Serve a store until the process is told to stop.

    Args:
        store: a `SessionStore`.
        root: the folder of its keys.
        host: address to listen on.
        port: port; 0 takes a free one.
        limits: what is taken; None for the defaults.
        started: called with the address and port when requests are taken.

    Raises:
        ConfigError: nothing can listen on the address.
    """
    listener = _listening(host, port)
    config = uvicorn.Config(
        create_app(store, KeyRing(root), limits),
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_STOP_S,
        lifespan="on",
    )
    # Ctrl-C comes after its requests ended.
    with listener, contextlib.suppress(KeyboardInterrupt):
        _Server(config, started).run([listener])


def _listening(host: str, port: int) -> socket.socket:
    """Return a socket on an address, or raise ConfigError where there can be none."""
    try:
        (family, kind, proto, _, address), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listener = socket.socket(family, kind, proto)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen()
        except BaseException:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:
        law = f"nothing can listen there ({getattr(error, 'strerror', None) or error})"
        cure = "Give another --port, 0 for a free one, or an address of this machine"
        asked = f"serving sessions on {host}:{port}"
        raise ConfigError(say(asked, law, cure)) from error
    return listener


class _Server(uvicorn.Server):
    """A server that says where it listens."""

    def __init__(self, config: uvicorn.Config, started: Callable | None):
        super().__init__(config)
        self._started_at = started

    async def startup(self, sockets=None) -> None:
        """Listen, then say where."""
        await super().startup(sockets)
        if self._started_at is not None and self.servers:
            host, port, *_ = self.servers[0].sockets[0].getsockname()
            self._started_at(host, port)
