"""Limits: a key has a second's requests, and no key takes another's."""

from kvmem.session.service.limits import Limiter


def test_a_bucket_holds_one_seconds_requests_and_fills_at_the_rate():
    now = [0.0]
    limiter = Limiter(50.0, lambda: now[0])
    assert [limiter.wait_s("a") for _ in range(50)] == [0.0] * 50
    assert round(limiter.wait_s("a"), 6) == 0.02
    now[0] += 0.1
    assert [limiter.wait_s("a") > 0 for _ in range(6)] == [False] * 5 + [True]
    now[0] += 3600.0
    assert sum(limiter.wait_s("a") == 0.0 for _ in range(100)) == 50


def test_a_refused_request_takes_nothing_and_keys_are_apart():
    now = [0.0]
    limiter = Limiter(2.0, lambda: now[0])
    assert [limiter.wait_s("a") for _ in range(5)] == [0.0, 0.0, 0.5, 0.5, 0.5]
    assert limiter.wait_s("b") == 0.0
    now[0] += 0.5
    assert limiter.wait_s("a") == 0.0
