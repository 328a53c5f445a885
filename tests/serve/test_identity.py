"""Identity: what differs in one dimension shares nothing, what says nothing adds
nothing."""

import hashlib
import itertools

import numpy as np
import pytest

from kvmem import errors
from kvmem.serve.identity import Identity, Image
from kvmem.store import chain_keys

CAT, DOG = (hashlib.sha256(name).digest() for name in (b"cat", b"dog"))

DIFFERENT = (
    Identity(),
    Identity(adapter=("math", 1)),
    Identity(adapter=("math", 2)),
    Identity(adapter=("math", "1")),
    Identity(adapter=("arts", 1)),
    Identity(salt="math"),
    Identity(salt=b"math"),
    Identity(tenant="math"),
    Identity(adapter=("math", 1), salt="arts"),
    Identity(adapter=("arts", 1), salt="math"),
    Identity(adapter=("math", 1), tenant="arts"),
    Identity(epoch=1),
    Identity(epoch=2),
    Identity(images=(Image(CAT, 2, 3),)),
    Identity(images=(Image(DOG, 2, 3),)),
    Identity(images=(Image(CAT, 1, 3),)),
    Identity(images=(Image(CAT, 2, 4),)),
    Identity(images=(Image(CAT, 2, 1), Image(CAT, 3, 2))),
)


def keys(identity, tokens=range(32), chunk=8):
    return chain_keys("m/f", tokens, chunk, identity.extras, identity.run_extras(chunk))


@pytest.mark.case("PFX-03")
@pytest.mark.case("PFX-04")
def test_identities_that_differ_in_one_dimension_share_no_key():
    for left, right in itertools.combinations(DIFFERENT, 2):
        assert not set(keys(left)) & set(keys(right)), (left, right)


@pytest.mark.case("PFX-04")
def test_an_identity_that_says_nothing_leaves_the_keys_as_they_are():
    assert (
        keys(Identity()) == keys(Identity(epoch=0)) == chain_keys("m/f", range(32), 8)
    )


@pytest.mark.case("PFX-01")
def test_images_separate_the_runs_they_touch_and_those_behind_them():
    one = b"\x01" * 28 + b"\xab\xcd\xef\x01"
    two = b"\x02" * 28 + b"\xab\xcd\xef\x01"
    assert one[-2:] == two[-2:]
    left, right = (keys(Identity(images=(Image(d, 12, 8),))) for d in (one, two))
    assert left[0] == right[0] == keys(Identity())[0]
    assert not set(left[1:]) & set(right[1:])
    assert Identity(images=(Image(one, 12, 8),)).run_extras(8).keys() == {1, 2}


def test_a_run_that_two_images_touch_names_both():
    said = Identity(images=(Image(CAT, 1, 2), Image(DOG, 6, 4))).run_extras(8)
    assert [extra.values for extra in said[0]] == [(CAT, 1, 2), (DOG, 6, 4)]
    assert [extra.values for extra in said[1]] == [(DOG, -2, 4)]


@pytest.mark.parametrize(
    ("facts", "phrase"),
    [
        ({"salt": ""}, "salt is non-empty"),
        ({"salt": b""}, "salt is non-empty"),
        ({"salt": 3}, "salt is non-empty"),
        ({"tenant": ""}, "tenant is a non-empty"),
        ({"tenant": b"x"}, "tenant is a non-empty"),
        ({"adapter": ("", 1)}, "adapter is a name and a version"),
        ({"adapter": ("a", "")}, "adapter is a name and a version"),
        ({"adapter": ("a", None)}, "adapter is a name and a version"),
        ({"adapter": ("a", True)}, "adapter is a name and a version"),
        ({"adapter": "math"}, "adapter is a name and a version"),
        ({"adapter": ("math",)}, "adapter is a name and a version"),
        ({"epoch": -1}, "epoch is an int"),
        ({"epoch": True}, "epoch is an int"),
        ({"salt": "\ud800"}, "salt is non-empty"),
        ({"tenant": "a\udfff"}, "tenant is a non-empty"),
        ({"adapter": ("\ud800", 1)}, "adapter is a name and a version"),
        ({"adapter": ("a", "\ud800")}, "adapter is a name and a version"),
        ({"adapter": ("a", np.int64(1))}, "adapter is a name and a version"),
        ({"images": None}, "a digest, a position and a length"),
        ({"images": "cat"}, "a digest, a position and a length"),
        ({"images": ["cat"]}, "a digest, a position and a length"),
        ({"images": [(CAT, 0)]}, "a digest, a position and a length"),
        ({"images": [(CAT, 0, 1.5)]}, "a digest, a position and a length"),
        ({"images": [(CAT, "0", 4)]}, "a digest, a position and a length"),
        ({"images": [(CAT, True, 4)]}, "a digest, a position and a length"),
        ({"images": [(CAT, np.int64(0), 4)]}, "a digest, a position and a length"),
        ({"images": [(CAT, 0, np.int64(4))]}, "a digest, a position and a length"),
        ({"images": [(bytearray(CAT), 0, 4)]}, "digest is whole"),
        ({"images": [(CAT[:2], 0, 4)]}, "digest is whole"),
        ({"images": [(CAT, 0, 0)]}, "hold a token each"),
        ({"images": [(CAT, -1, 4)]}, "hold a token each"),
        ({"images": [(CAT, 0, 4), (DOG, 3, 4)]}, "follow one another"),
    ],
)
def test_what_says_nothing_or_cannot_be_is_refused(facts, phrase):
    with pytest.raises(errors.ConfigError, match=phrase):
        Identity(**facts)


@pytest.mark.parametrize("salt", ["s3cr3t", b"s3cr3t"])
def test_a_salt_is_printed_nowhere(salt):
    identity = Identity(salt=salt, tenant="acme")
    assert repr(identity) == str(identity) == "Identity(salt=<hidden>, tenant='acme')"
    with pytest.raises(errors.ConfigError) as refusal:
        Identity(salt=salt, tenant="")
    with pytest.raises(errors.ConfigError) as other:
        Identity(salt=["s3cr3t"], tenant="acme")
    assert "s3cr3t" not in f"{refusal.value} {other.value}"
    assert repr(Identity()) == "Identity()"


def test_everything_wrong_is_said_at_once():
    with pytest.raises(errors.ConfigError, match=r"salt .*tenant .*epoch"):
        Identity(salt="", tenant="", epoch=-2)


def test_an_image_beyond_the_prompt_is_refused():
    identity = Identity(images=(Image(CAT, 4, 4),))
    identity.require_fits(8)
    with pytest.raises(errors.ConfigError, match="of 7 tokens here"):
        identity.require_fits(7)


def test_an_identity_is_a_fact():
    assert hash(Identity(images=[[CAT, 0, 4]], adapter=["a", 1]))
    assert Identity(salt="x").at_epoch(3) == Identity(salt="x", epoch=3)
