"""Joint ids: of a target and its draft together, and of neither alone."""

import itertools
import types

from kvmem.model import joint


def model(name):
    facts = {"tensors": [name]}
    return types.SimpleNamespace(facts=facts, model_id=f"id of {name}")


def test_every_pair_has_an_id_of_its_own():
    pairs = itertools.product("abc", "abc")
    ids = {joint.model_id(model(one), model(other)) for one, other in pairs}
    assert len(ids) == 9 and all(len(each) == 64 for each in ids)


def test_without_a_draft_the_id_is_the_targets():
    assert joint.model_id(model("a"), None) == "id of a"
    assert joint.facts(model("a"), None) == {"tensors": ["a"]}


def test_the_facts_name_both():
    said = joint.facts(model("a"), model("b"))
    assert (said["target"], said["draft"]) == ({"tensors": ["a"]}, {"tensors": ["b"]})
