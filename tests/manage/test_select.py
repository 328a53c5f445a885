"""Which manager serves, and why: every row of the table, with its reason."""

import pytest

from kvmem import errors
from kvmem.manage import Plan, Route, preference_of, select

GROUPED, STATIC = "grouped", "static_split"
NIXL = Route("NIXL", "PYTHON")
FOREIGN = (Route("UCX", "PYTHON"), Route("NIXL", "CPP"))
BOTH = ("kvmem", "tensorrt-llm")


@pytest.mark.parametrize("rules", BOTH)
class TestEveryRuleSet:
    @pytest.mark.parametrize("requested", [None, "auto"])
    @pytest.mark.parametrize("preference", [None, STATIC, "auto"])
    @pytest.mark.parametrize("engines", ["none", "one", "two"])
    def test_without_a_preference_the_split_is_static(
        self, rules, requested, preference, engines
    ):
        found = select(requested, preference, Plan("M", engines), rules)
        assert (found.name, found.is_fallback) == (STATIC, False)
        assert found.reason.startswith("M ")
        assert found.provenance == (requested or "unset")

    @pytest.mark.parametrize("requested", [None, "auto"])
    @pytest.mark.parametrize("engines", ["none", "one"])
    def test_a_preference_decides_what_nobody_asked(self, rules, requested, engines):
        found = select(requested, GROUPED, Plan("M", engines), rules)
        assert found == (GROUPED, "M prefers it", requested or "unset", False)

    def test_two_engines_make_a_default_give_way_with_the_reason(self, rules):
        found = select(None, GROUPED, Plan("M", "two"), rules)
        assert (found.name, found.is_fallback) == (STATIC, True)
        assert "M prefers grouped" in found.reason
        assert "whole byte budget" in found.reason and "joint" in found.reason

    @pytest.mark.parametrize("preference", [None, GROUPED, STATIC, "auto"])
    @pytest.mark.parametrize("engines", ["none", "one", "two"])
    @pytest.mark.parametrize("requested", [False, STATIC])
    def test_static_is_had_for_the_asking(self, rules, preference, engines, requested):
        found = select(requested, preference, Plan("M", engines), rules)
        assert found == (STATIC, "it was asked for", "explicit", False)

    @pytest.mark.parametrize("preference", [None, GROUPED, STATIC, "auto"])
    @pytest.mark.parametrize("requested", [True, GROUPED])
    def test_grouped_is_had_for_the_asking(self, rules, preference, requested):
        for engines in ("none", "one"):
            found = select(requested, preference, Plan("M", engines), rules)
            assert found == (GROUPED, "it was asked for", "explicit", False)

    @pytest.mark.parametrize("preference", [None, GROUPED, STATIC])
    @pytest.mark.parametrize("requested", [True, GROUPED])
    def test_grouped_asked_for_two_engines_is_refused_with_the_cure(
        self, rules, preference, requested
    ):
        with pytest.raises(errors.IncompatiblePlan, match="whole byte budget") as said:
            select(requested, preference, Plan("M", "two"), rules)
        assert isinstance(said.value, ValueError)
        assert "joint=True" in str(said.value) and "'auto'" in str(said.value)

    @pytest.mark.parametrize("requested", [None, "auto", True])
    def test_one_joint_manager_serves_two_engines(self, rules, requested):
        found = select(requested, GROUPED, Plan("M", "two", joint=True), rules)
        assert (found.name, found.is_fallback) == (GROUPED, False)

    @pytest.mark.parametrize("wrong", ["V2", "", 1, 0, "Auto", b"grouped"])
    def test_any_other_request_is_refused(self, rules, wrong):
        with pytest.raises(errors.ConfigError, match="manager = .*static_split, auto"):
            select(wrong, GROUPED, Plan(), rules)

    @pytest.mark.parametrize("wrong", ["V2", True, False, 2, ""])
    def test_any_other_preference_is_refused_by_the_name_of_its_class(
        self, rules, wrong
    ):
        with pytest.raises(errors.ConfigError, match="that GptOss prefers = "):
            select(None, wrong, Plan("GptOss"), rules)


@pytest.mark.case("CFG-03")
def test_the_documented_rule_is_the_rule():
    def outcome(requested, engines):
        try:
            return select(requested, GROUPED, Plan("M", engines)).name
        except errors.IncompatiblePlan:
            return "error"

    table = {
        requested: [outcome(requested, engines) for engines in ("none", "one", "two")]
        for requested in ("auto", True, False)
    }
    assert table == {
        "auto": [GROUPED, GROUPED, STATIC],
        True: [GROUPED, GROUPED, "error"],
        False: [STATIC, STATIC, STATIC],
    }
    assert all(
        select(requested, GROUPED, Plan("M", engines)).reason
        for requested in ("auto", False)
        for engines in ("none", "one", "two")
    )


def test_a_default_that_was_merged_in_is_not_what_a_person_wrote():
    # The model's default, merged into the config, reads like an explicit choice: the
    # first line must not be given to `select`, the second is what was really asked.
    merged, written = GROUPED, None
    with pytest.raises(errors.IncompatiblePlan):
        select(merged, GROUPED, Plan("M", "two"))
    found = select(written, GROUPED, Plan("M", "two"))
    assert (found.name, found.provenance) == (STATIC, "unset")


class TestTheRulesOfTensorRTLLM:
    rules = "tensorrt-llm"

    @pytest.mark.parametrize("route", FOREIGN)
    @pytest.mark.parametrize("requested", [None, "auto"])
    def test_a_route_that_cannot_send_pages_makes_a_default_give_way(
        self, route, requested
    ):
        found = select(requested, GROUPED, Plan("M", route=route), self.rules)
        assert (found.name, found.is_fallback) == (STATIC, True)
        assert route.backend in found.reason and "NIXL from a python" in found.reason
        assert select(requested, GROUPED, Plan("M", route=NIXL), self.rules).name == (
            GROUPED
        )

    @pytest.mark.parametrize("route", FOREIGN)
    def test_an_explicit_choice_wins_over_the_route_but_for_states(self, route):
        found = select(True, None, Plan("M", route=route), self.rules)
        assert found == (GROUPED, "it was asked for", "explicit", False)
        with pytest.raises(errors.IncompatiblePlan, match="the states of M"):
            select(True, None, Plan("M", route=route, has_states=True), self.rules)
        hybrid = Plan("M", route=NIXL, has_states=True)
        assert select(True, None, hybrid, self.rules).name == GROUPED

    @pytest.mark.parametrize("route", [Route("auto", "PYTHON"), Route("NIXL", "auto")])
    @pytest.mark.parametrize("requested", [None, "auto", True, False])
    def test_the_route_is_resolved_before_the_manager(self, route, requested):
        with pytest.raises(errors.ConfigError, match="it comes first"):
            select(requested, GROUPED, Plan("M", route=route), self.rules)

    @pytest.mark.parametrize("requested", [None, "auto", True, False])
    @pytest.mark.parametrize("preference", [None, STATIC])
    def test_head_dims_of_their_own_override_everything(self, requested, preference):
        plan = Plan("M", has_own_head_dims=True)
        found = select(requested, preference, plan, self.rules)
        assert found.name == GROUPED and "head dims" in found.reason

    def test_further_snapshots_refuse_a_static_split(self):
        plan = Plan("M", has_extra_snapshots=True)
        with pytest.raises(errors.IncompatiblePlan, match="further offsets"):
            select(False, GROUPED, plan, self.rules)
        assert select(None, GROUPED, plan, self.rules).name == GROUPED


@pytest.mark.parametrize(
    "unread",
    [
        dict(route=NIXL),
        dict(has_states=True),
        dict(has_own_head_dims=True),
        dict(has_extra_snapshots=True),
    ],
)
def test_facts_that_a_rule_set_does_not_read_are_refused(unread):
    (name,) = unread
    with pytest.raises(errors.ConfigError, match=f"a plan with {name}"):
        select(None, None, Plan(**unread))


def test_unknown_rule_sets_and_engines_are_refused():
    with pytest.raises(errors.ConfigError, match="kvmem, tensorrt-llm"):
        select(None, None, Plan(), "trtllm")
    with pytest.raises(errors.ConfigError, match="none, one, two"):
        Plan(engines="both")


def test_a_model_of_several_groups_prefers_the_grouped_manager(mix):
    assert preference_of(*mix().groups()) == GROUPED
    assert preference_of(*mix(windowed=0).groups()) is None
