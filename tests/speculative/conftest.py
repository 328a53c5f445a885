"""Builders of this room's tests."""

import dataclasses

import pytest

from kvmem.speculative import Backends, Server, SpecPlan, check

_SERVER = {field.name for field in dataclasses.fields(Server)}
_BACKENDS = {field.name for field in dataclasses.fields(Backends)}


@pytest.fixture
def plan_of():
    """Make a plan from facts of the plan, its server and its backends alike."""

    def make(**facts):
        server = {k: facts.pop(k) for k in list(facts) if k in _SERVER}
        backends = {k: facts.pop(k) for k in list(facts) if k in _BACKENDS}
        return SpecPlan(**facts, server=Server(**server), backends=Backends(**backends))

    return make


@pytest.fixture
def broken(plan_of):
    """Return the names of the gates that a plan of these facts breaks."""

    def ask(rules="sglang", **facts):
        return {each.gate for each in check(plan_of(**facts), rules)}

    return ask
