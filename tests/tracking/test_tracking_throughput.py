"""Time and throughput metrics: verl's names, and reducers that survive merging."""

import pytest

from verl.tracking.throughput import (
    is_time_metric,
    memory_metrics,
    step_metrics,
    throughput_metrics,
    timing_per_token_metrics,
)


def test_step_metrics_by_hand():
    metrics = step_metrics({"gen": 2.0, "reward": 0.5, "update_actor": 1.0}, 100, 400, step_seconds=4.0, devices=2)
    results = metrics.results()
    assert results["timing_s/gen"] == 2.0 and results["timing_s/step"] == 4.0
    assert results["timing_per_token_ms/gen"] == pytest.approx(20.0)
    assert results["timing_per_token_ms/update_actor"] == pytest.approx(2.5)
    assert "timing_per_token_ms/reward" not in results
    assert results["perf/total_num_tokens"] == 400 and results["perf/throughput"] == pytest.approx(50.0)
    assert results["perf/time_per_step"] == 4.0 and results["perf/cpu_memory_used_gb"] > 0
    assert all(is_time_metric(name) for name in results)
    assert is_time_metric("time") and not is_time_metric("actor/pg_loss") and not is_time_metric("step")


def test_merging_weighs_by_tokens_and_time():
    a, b = throughput_metrics(100, 1.0), throughput_metrics(100, 3.0)
    assert a.merge(b)["perf/throughput"] == pytest.approx(200 / 4)
    a, b = timing_per_token_metrics({"gen": 1.0}, 10, 0), timing_per_token_metrics({"gen": 1.0}, 30, 0)
    assert a.merge(b)["timing_per_token_ms/gen"] == pytest.approx(1000 * 2 / 40)


def test_nothing_generated_and_no_time():
    assert len(timing_per_token_metrics({"gen": 1.0}, 0, 0)) == 0
    with pytest.raises(ValueError, match="0 s"):
        throughput_metrics(10, 0.0)


def test_memory_is_of_this_machine():
    import psutil

    used = memory_metrics()["perf/cpu_memory_used_gb"]
    assert 0 < used < psutil.virtual_memory().total / 1024**3
