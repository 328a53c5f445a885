"""A root by name: a folder is a page store, an s3:// URL is an object store.

The law: a URL never becomes a folder, and a scheme that no test covers is refused.

    with open_root("s3://bucket/kv", model_id, format_id, 46_080) as store:
        ...
"""

from pathlib import Path

from kvmem.errors import ConfigError, say
from kvmem.store import bucket
from kvmem.store.object_store import ObjectStore
from kvmem.store.page_store import PageStore


def open_root(
    root: str | Path,
    model_id: str,
    format_id: str,
    record_nbytes: int,
    chunk_tokens: int = 16,
    read_only: bool = False,
    *,
    max_nbytes: int | None = None,
    endpoint: str | None = None,
    region: str | None = None,
) -> PageStore | ObjectStore:
    """Open the store that a root names.

    Args:
        root: a folder, or s3://bucket/prefix.
        model_id, format_id, record_nbytes, chunk_tokens, read_only: as both say.
        max_nbytes: what the files or objects of this model and format may take; other
            models and formats of the root are not counted.
        endpoint, region: where an object store's server is.

    Raises:
        ConfigError: an option of the other kind of root, or an unknown scheme.
    """
    check_options(root, max_nbytes=max_nbytes, endpoint=endpoint, region=region)
    facts = model_id, format_id, record_nbytes, chunk_tokens, read_only
    if bucket.scheme_of(root) is None:
        return PageStore.open(root, *facts, max_nbytes=max_nbytes)
    place = {"endpoint": endpoint, "region": region}
    return ObjectStore.open(str(root), *facts, max_nbytes=max_nbytes, **place)


def check_options(
    root: str | Path | None,
    *,
    max_nbytes: int | None,
    endpoint: str | None,
    region: str | None,
) -> None:
    """Raise for a scheme that no test covers, or an option that would do nothing."""
    if root and bucket.scheme_of(root):
        bucket.open_bucket(str(root), endpoint, region)
        return
    idle = {"endpoint": endpoint, "region": region}
    why = "only an s3:// root has a server"
    if not root:
        idle["max_nbytes"] = max_nbytes
        why = "without a root nothing is kept"
    given = [name for name, value in idle.items() if value is not None]
    if given:
        raise ConfigError(
            say(
                f"store.{', store.'.join(given)} with root {str(root)!r}",
                why,
                "Leave it out, or give the root that it belongs to",
            )
        )
