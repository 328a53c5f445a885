"""Metrics: counts that add up, and labels of the service's own."""

import re

from kvmem.session.service.metrics import Metrics

_SAMPLE = re.compile(r'[a-z_]+({([a-z]+="[^"\n\\]*",?)+})? [0-9.e+-]+')


def test_the_text_is_prometheus_and_its_counts_add_up():
    metrics = Metrics()
    metrics.answered("recall", 200, 0.004)
    metrics.answered("recall", 429, 30.0)
    metrics.recalled("ok")
    metrics.appended(3)
    text = metrics.text()
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    assert text.endswith("\n") and all(_SAMPLE.fullmatch(s) for s in samples)
    assert 'kvmem_requests_total{verb="recall",status="200"} 1' in samples
    assert 'kvmem_request_seconds_bucket{verb="recall",le="0.0025"} 0' in samples
    assert 'kvmem_request_seconds_bucket{verb="recall",le="0.005"} 1' in samples
    assert 'kvmem_request_seconds_bucket{verb="recall",le="5.0"} 1' in samples
    assert 'kvmem_request_seconds_bucket{verb="recall",le="+Inf"} 2' in samples
    assert 'kvmem_request_seconds_count{verb="recall"} 2' in samples
    assert 'kvmem_request_seconds_sum{verb="recall"} 30.004000' in samples
    assert 'kvmem_recalls_total{status="ok"} 1' in samples
    assert "kvmem_messages_appended_total 3" in samples
