"""Problems: an error goes out as a status and comes back as itself."""

import errno

import pytest

from kvmem import errors
from kvmem.session import problems

_OF_THE_CALLER = (
    errors.InvalidId,
    errors.ActorRequired,
    errors.Denied,
    errors.NotFound,
    errors.Conflict,
    errors.Deleted,
    errors.Busy,
    errors.ConfigError,
)


@pytest.mark.parametrize("kind", _OF_THE_CALLER)
def test_an_error_of_the_caller_comes_back_as_itself(kind):
    problem = problems.of(kind("what was asked: the law. Do this."))
    back = problems.error_of(problem.status, problem.body)
    assert type(back) is kind and str(back) == "what was asked: the law. Do this."
    assert 400 <= problem.status < 500 or problem.name == "busy"


@pytest.mark.parametrize(
    "error",
    [
        errors.CorruptPage("line 2 of /srv/root/accounts/lab/users/bob"),
        errors.FormatMismatch("/srv/root of bob"),
        OSError(errno.ENOSPC, "No space left", "/srv/root/accounts/lab/users/bob"),
        ValueError("bob"),
        KeyError("bob"),
    ],
)
def test_a_fault_of_the_service_names_no_path_and_nobody(error):
    problem = problems.of(error)
    assert problem.status >= 500
    assert "bob" not in str(problem.body) and "/srv" not in str(problem.body)


def test_an_answer_that_is_no_problem_is_still_an_error():
    error = problems.error_of(502, None)
    assert isinstance(error, errors.KVMemError) and "502" in str(error)
