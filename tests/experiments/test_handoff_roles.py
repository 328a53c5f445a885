"""What a process of the handoff met comes back in its words."""

import dataclasses

import pytest

from experiments import handoff_roles
from experiments.handoff_roles import Job, Side
from kvmem import errors, exits
from kvmem.config import ModelConfig
from kvmem.serve import ServeConfig


def job(**changes) -> Job:
    made = Job(
        role="know",
        side=Side(1, 4, 4),
        model=ModelConfig("nowhere"),
        serve=ServeConfig(),
        prompt_ids=(1,),
        tokens=1,
        store_root="",
        chunk_tokens=4,
        repetitions=1,
    )
    return dataclasses.replace(made, **changes)


def test_what_a_process_met_comes_back_as_its_type_and_its_words():
    with pytest.raises(errors.ConfigError) as met:
        handoff_roles.run_role(job(), lambda _: None)
    assert str(met.value).startswith("model 'nowhere': a model is a preset")
    assert exits.verdict(met.value) == (2, str(met.value))
    assert "Traceback" not in str(met.value)


def test_a_fault_of_a_process_is_its_last_line_and_all_of_it_in_the_cause():
    with pytest.raises(errors.Busy) as met:
        handoff_roles.run_role(job(serve=None), lambda _: None)
    assert "ended with code 1: TypeError" in str(met.value)
    assert "Traceback" not in str(met.value)
    assert "Traceback" in str(met.value.__cause__)
