"""A bucket: objects under one prefix of an object store, and its two atomic puts.

An object store has no rename and no lock. It has a put that is refused where an object
already stands (If-None-Match), and one that is refused where the object has changed
(If-Match). The law: `put_new` and `replace` are those, atomic at the server, or the
bucket is refused for writing; a `read` sees every put that was answered before it.

    bucket = open_bucket("s3://my-bucket/kv", endpoint="http://127.0.0.1:9000")
    bucket.require_conditional_put()
    bucket.put_new("00000001.json", data)        # None if there is one already

TensorStore speaks to the server. Credentials are those of the environment, as for
every other S3 client. Schemes that no test covers are refused.
"""

import concurrent.futures
import contextlib
import errno
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence

import tensorstore

from kvmem.errors import ConfigError, say

SCHEMES = ("s3",)
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/+(.*)")
_RETRIES = {"max_retries": 4, "initial_delay": "100ms", "max_delay": "1s"}
_AT_ONCE = 16
_ABSENT = (
    b"\x02"  # TensorStore's name for the generation of an object that is not there
)


def scheme_of(root: object) -> str | None:
    """Return the scheme of a URL, None for a path of this machine."""
    match = _URL.match(str(root))
    return match[1].lower() if match else None


def open_bucket(
    url: str, endpoint: str | None = None, region: str | None = None
) -> "Bucket":
    """Return the objects under an URL such as s3://bucket/prefix; nothing is sent yet.

    Args:
        url: scheme, bucket and prefix.
        endpoint: address of the server, None for the scheme's own.
        region: of the bucket; None: the environment's.

    Raises:
        ConfigError: a scheme that no test covers, or no bucket in the URL.
    """
    match = _URL.match(str(url))
    name, _, prefix = match[2].partition("/") if match else ("", "", "")
    if not match or match[1].lower() not in SCHEMES or not name:
        raise ConfigError(
            say(
                f"an object store at {url}",
                "records are kept on s3://bucket/prefix, the one scheme that is tested",
                "Use s3:// (of any server that speaks it), or a folder",
            )
        )
    if {".", ".."} & set(prefix.split("/")):
        raise ConfigError(
            say(
                f"an object store at {url}",
                "objects have names and no folders, so . and .. lead nowhere",
                "Write the prefix out",
            )
        )
    spec = {"driver": "s3", "bucket": name, "use_conditional_write": True}
    spec["context"] = {"s3_request_retries": _RETRIES}
    if "AWS_ACCESS_KEY_ID" in os.environ:  # else files and the machine are asked too
        spec["aws_credentials"] = {"type": "environment"}
    if endpoint is not None:
        spec["endpoint"] = endpoint
    if region is not None:
        spec["aws_region"] = region
    return Bucket(str(url).rstrip("/"), spec, prefix.strip("/"))


class Bucket:
    """Objects by name below the prefix; errors of the server are `OSError`s."""

    def __init__(self, url: str, spec: dict, prefix: str):
        """Bind a TensorStore spec to a prefix; `open_bucket` makes one."""
        self.url = url
        self._spec = spec
        self._prefix = f"{prefix}/" if prefix else ""
        try:
            self._objects = tensorstore.KvStore.open(self.spec()).result()
        except (ValueError, RuntimeError) as error:
            raise ConfigError(
                say(
                    f"an object store at {url}",
                    f"TensorStore does not take it ({error})",
                    "Mend the bucket's name, the endpoint or the region",
                )
            ) from error

    def spec(self, name: str = "") -> dict:
        """Return TensorStore's spec of what lies below `name`."""
        return self._spec | {"path": self._prefix + name}

    def read(self, name: str) -> bytes | None:
        """Return an object's bytes, None where there is none."""
        return self.read_versioned(name)[0]

    def read_versioned(self, name: str) -> tuple[bytes | None, bytes]:
        """Return an object's bytes and the generation that `replace` asks for."""
        with self.told("read", name):
            found = self._objects.read(name).result()
        value = found.value if found.state == "value" else None
        return value, found.stamp.generation

    def read_all(self, names: Sequence[str]) -> list[bytes | None]:
        """Return several objects' bytes, read side by side."""
        with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as threads:
            return list(threads.map(self.read, names))

    def put(self, name: str, data: bytes) -> None:
        """Put an object, replacing what was there."""
        with self.told("put", name):
            self._objects.write(name, data).result()

    def put_new(self, name: str, data: bytes) -> bytes | None:
        """Put an object where there is none; return its generation, None if there is.

        A put whose answer was lost is sent again and then meets itself: it is known by
        its bytes, so they must differ from every other writer's.
        """
        return self.replace(name, data, _ABSENT)

    def replace(self, name: str, data: bytes, generation: bytes) -> bytes | None:
        """Put an object where this generation stands; return the new one, else None."""
        with self.told("put", name):
            stamp = self._objects.write(name, data, if_equal=generation).result()
        if stamp.generation:
            return stamp.generation
        value, current = self.read_versioned(name)
        return current if value == data else None

    def names(self, under: str = "") -> list[str]:
        """Return the names of all objects that start with `under`, sorted."""
        after = under[:-1] + chr(ord(under[-1]) + 1) if under else ""
        keys = tensorstore.KvStore.KeyRange(under, after)
        with self.told("list", under):
            listed = self._objects.list(keys).result()
        return sorted(name.decode() for name in listed)

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; those that are not there are no error."""
        with self.told("delete"):
            for pending in [self._objects.write(name, None) for name in names]:
                pending.result()

    def require_conditional_put(self) -> None:
        """Raise unless the server refuses what a conditional put must be refused.

        Raises:
            ConfigError: it has no conditional put, so nothing here could hold a lock.
        """
        name = f"_probe-{secrets.token_hex(8)}"
        try:
            first = self.put_new(name, b"first")
            second = self.replace(name, b"second", first) if first else None
            is_refused = second and not (
                self.put_new(name, b"third") or self.replace(name, b"fourth", first)
            )
        except OSError as error:
            if "501" not in str(error) and "NotImplemented" not in str(error):
                raise
            is_refused = False
        finally:
            with contextlib.suppress(OSError):
                self.delete([name])
        if not is_refused:
            raise ConfigError(
                say(
                    f"a writer on {self.url}",
                    "its server has no conditional put (If-None-Match and If-Match), "
                    "and without one two writers would not notice each other",
                    "Use a server that has it, or open the store with read_only=True",
                )
            )

    @contextlib.contextmanager
    def told(self, verb: str, name: str = "") -> Iterator[None]:
        """Turn the server's refusals into an OSError that names the object."""
        try:
            yield
        except (ValueError, RuntimeError, OSError) as error:
            where = f"{self.url}/{name}"
            raise OSError(errno.EIO, f"{verb}: {error}", where) from error
