"""Whose memory a text is: what changes its KV, or who may see it, besides its tokens.

The law: two requests share pages or stored records only if their identities are equal
in every dimension, up to the first page (or chunk) that an image touches and another
image, or none, touches in the other. Each dimension is typed and has a name of its own,
so an adapter called like a salt never meets it. None says nothing and leaves keys as
they are without identities; an empty value is refused.

    Identity(adapter=("math", 2))            # a reloaded adapter is version 3
    Identity(tenant="acme", salt=b"...")
    Identity(images=(Image(sha256_digest, position=12, length=64),))

An identity keeps memory apart. It applies no adapter and encodes no image: whoever
does that says so here.
"""

import dataclasses
import functools
from typing import NamedTuple

from kvmem import errors
from kvmem.store import Extra

__all__ = ["PLAIN", "Identity", "Image"]

_LEAST_DIGEST = 16  # bytes; a shorter digest is a cut one, and images would meet


class Image(NamedTuple):
    """An image behind placeholder tokens [position, position + length) of a prompt."""

    digest: bytes
    position: int
    length: int

    @property
    def end(self) -> int:
        """The position after its last placeholder."""
        return self.position + self.length


@dataclasses.dataclass(frozen=True)
class Identity:
    """What holds for one request's text.

    Args:
        adapter: name and version; loaded anew under one name, it has a new version.
        salt: a secret or a purpose that separates texts; printed nowhere.
        tenant: on whose behalf; tenants share nothing.
        images: behind placeholder tokens of the prompt, in order of position.
        epoch: of the weights that the text is to be computed with; None: the engine's.

    Raises:
        ConfigError: every value that says nothing or cannot be, at once.
    """

    adapter: tuple[str, str | int] | None = None
    salt: str | bytes | None = None
    tenant: str | None = None
    images: tuple[Image, ...] = ()
    epoch: int | None = None

    def __post_init__(self):
        if isinstance(self.adapter, list):
            object.__setattr__(self, "adapter", tuple(self.adapter))
        object.__setattr__(self, "images", _as_images(self.images))
        broken = [law for law, holds in self._laws().items() if not holds]
        if broken:
            raise errors.ConfigError(
                errors.say(
                    f"the identity {self}",
                    f"the law is {', '.join(broken)}",
                    "Leave out what there is nothing to say about",
                )
            )

    def __repr__(self) -> str:
        """Return what is said, with nothing of the salt: it may be a secret."""
        said = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self)
        }
        shown = (
            f"{name}={'<hidden>' if name == 'salt' else repr(value)}"
            for name, value in said.items()
            if value is not None and value != ()
        )
        return f"Identity({', '.join(shown)})"

    @functools.cached_property
    def extras(self) -> tuple[Extra, ...]:
        """What holds for the whole text, as page keys and the prefix tree take it.

        The first weights of a process, epoch 0, add nothing.
        """
        said = {
            "adapter": self.adapter,
            "salt": None if self.salt is None else (self.salt,),
            "tenant": None if self.tenant is None else (self.tenant,),
            "epoch": (self.epoch,) if self.epoch else None,
        }
        return tuple(Extra(kind, values) for kind, values in said.items() if values)

    def run_extras(self, run_tokens: int) -> dict[int, tuple[Extra, ...]]:
        """Return the images of each run of `run_tokens` tokens that one touches.

        A page and a chunk are both runs. An image is told by its whole digest, by where
        it begins, counted from the run's first token (before it: negative), and by its
        length.
        """
        found: dict[int, tuple[Extra, ...]] = {}
        for image in self.images:
            last = (image.end - 1) // run_tokens
            for run in range(image.position // run_tokens, last + 1):
                begins = image.position - run * run_tokens
                extra = Extra("image", (image.digest, begins, image.length))
                found[run] = (*found.get(run, ()), extra)
        return found

    def at_epoch(self, epoch: int) -> "Identity":
        """Return this identity under the weights of `epoch`."""
        return dataclasses.replace(self, epoch=epoch)

    def require_fits(self, prompt_tokens: int) -> None:
        """Refuse images that stand beyond a prompt.

        Raises:
            ConfigError: with the image and the length.
        """
        if self.images and self.images[-1].end > prompt_tokens:
            raise errors.ConfigError(
                errors.say(
                    f"an image at {self.images[-1].position} to {self.images[-1].end}",
                    f"images stand within the prompt, of {prompt_tokens} tokens here",
                    "Give the positions of the prompt's own placeholder tokens",
                )
            )

    def _laws(self) -> dict[str, bool]:
        """Return each law and whether it holds."""
        are_images = _are_images(self.images)
        images = self.images if are_images else ()
        ends = [0, *(image.end for image in images)]
        return {
            "adapter is a name and a version, str and str or int": self.adapter is None
            or _is_adapter(self.adapter),
            "salt is non-empty str or bytes": self.salt is None
            or (isinstance(self.salt, bytes) and bool(self.salt))
            or _is_text(self.salt),
            "tenant is a non-empty str": self.tenant is None or _is_text(self.tenant),
            "epoch is an int from 0": self.epoch is None
            or (_is_int(self.epoch) and self.epoch >= 0),
            "images are a digest, a position and a length each, int and int": (
                are_images
            ),
            f"an image's digest is whole, {_LEAST_DIGEST} bytes at least": all(
                isinstance(image.digest, bytes) and len(image.digest) >= _LEAST_DIGEST
                for image in images
            ),
            "images hold a token each and follow one another": all(
                image.length >= 1 and image.position >= end
                for image, end in zip(images, ends, strict=False)
            ),
        }


def _as_images(value: object) -> object:
    """Return images as such where they have three parts; others stay as they are."""
    if not isinstance(value, list | tuple):
        return value
    return tuple(
        Image(*each) if isinstance(each, list | tuple) and len(each) == 3 else each
        for each in value
    )


def _are_images(value: object) -> bool:
    return isinstance(value, tuple) and all(
        isinstance(each, Image) and _is_int(each.position) and _is_int(each.length)
        for each in value
    )


def _is_adapter(value: object) -> bool:
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    name, version = value
    return _is_text(name) and (_is_int(version) or _is_text(version))


def _is_text(value: object) -> bool:
    """Say whether a value is a str that says something and has a UTF-8 form."""
    if not isinstance(value, str):
        return False
    return bool(value) and not any("\ud800" <= char <= "\udfff" for char in value)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


PLAIN = Identity()  # says nothing: text of the model itself
