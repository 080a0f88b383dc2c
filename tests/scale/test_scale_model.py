"""The scale model against cases worked out by hand."""

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

from scale_model import Case, Links, Model, predict, table  # noqa: E402

LINKS = Links(gpus_per_node=8, inside=100e9, between=10e9, latency=1e-3)
MODEL = Model(parameters=1e9, live_bytes=2, micro_batches=2, optimizer_steps=3)
PHASES = {
    "gen": [(10.0, 4.0), (20.0, 6.0)],
    "ref": [(10.0, 1.0)],
    "values": [(10.0, 1.5)],
    "old_logp": [(10.0, 2.0)],
    "update_actor": [(10.0, 8.0)],
    "update_critic": [(10.0, 7.0)],
}
CASE = Case(PHASES, MODEL, LINKS, seconds_a_sequence=0.01)


def test_a_ring_moves_all_but_ones_own_part_over_the_slowest_link():
    assert LINKS.ring(100e9, 1) == 0
    assert LINKS.ring(100e9, 2) == pytest.approx(0.5 + 0.001)  # half of it, one hop
    assert LINKS.ring(100e9, 8) == pytest.approx(0.875 + 0.007)
    assert LINKS.ring(100e9, 16) == pytest.approx(9.375 + 0.015), "between nodes"


def test_phases_are_lines_through_what_was_measured():
    assert [CASE.compute("gen", n) for n in (1, 10, 15, 20, 40)] == [4.0, 4.0, 5.0, 6.0, 12.0]
    assert CASE.compute("reward", 10) == 0.0


def test_one_gpu_moves_nothing_and_adds_up():
    found = predict(CASE, 1, 10)
    assert found["step"] == pytest.approx(4 + 1 + 1.5 + 2 + 8 + 7 + 10 * 0.01)
    assert found["reshard"] == 0 and found["controller"] == pytest.approx(0.1)


def test_two_gpus_by_hand():
    gather = 2e9 * 0.5 / 100e9 + 0.001  # 0.011
    scatter = 4e9 * 0.5 / 100e9 + 0.001  # 0.021
    found = predict(CASE, 2, 20)
    assert found["reshard"] == pytest.approx(gather)
    assert found["ref"] == pytest.approx(1 + 2 * gather)
    assert found["update_actor"] == pytest.approx(8 + 4 * gather + 3 * scatter)
    moved = gather + 3 * 2 * gather + 2 * (4 * gather + 3 * scatter)
    assert found["step"] == pytest.approx(23.5 + moved + 0.2)


def test_communication_hides_as_far_as_there_is_computing():
    half = Case(PHASES, Model(1e9, 2, 2, 3, overlap=0.5), LINKS)
    plain = Case(PHASES, MODEL, LINKS)
    moved = plain.update("update_actor", 20, 2) - 8
    assert half.update("update_actor", 20, 2) == pytest.approx(8 + moved / 2)
    slow = Case({"update_actor": [(10.0, 0.01)]}, Model(1e9, 2, 2, 3, overlap=1.0), LINKS)
    assert slow.update("update_actor", 20, 2) == pytest.approx(moved), "no more than the computing hides"


def test_separate_pools_run_side_by_side():
    free = Case(PHASES, Model(0.0), Links(8, 1.0, 1.0))  # nothing to move
    found = predict(free, 4, 20, "separate")
    # two GPUs for the policy, one each for reference and critic
    assert (found["gen"], found["old_logp"], found["ref"], found["values"]) == (4.0, 2.0, 2.0, 3.0)
    assert (found["update_actor"], found["update_critic"]) == (8.0, 14.0)
    assert found["step"] == pytest.approx(4 + 3 + 14)
    with pytest.raises(ValueError, match="too few for 2 pools"):
        predict(free, 2, 20, "separate")


def test_one_step_off_takes_the_longer_side():
    free = Case(PHASES, Model(0.0), Links(8, 1.0, 1.0))
    found = predict(free, 4, 20, "one_step_off")
    assert found["step"] == pytest.approx(2.0 + 1.0 + 1.5 + 8.0 + 7.0), "two learners; generation takes 4.0 beside them"
    most = predict(free, 4, 20, "one_step_off", share=0.25)
    assert most["gen"] == 6.0 and most["step"] == pytest.approx(max(6.0, 19.5))
    scored = Case({**PHASES, "reward": [(10.0, 20.0)]}, Model(0.0), Links(8, 1.0, 1.0))
    assert predict(scored, 4, 20, "one_step_off")["step"] == pytest.approx(4.0 + 20.0), "scoring is the makers' work"
    bare = {name: points for name, points in PHASES.items() if name != "old_logp"}
    assert predict(Case(bare, Model(0.0), Links(8, 1.0, 1.0)), 4, 20, "one_step_off")["old_logp"] == 1.0, "as the ref"
    slow = Case(PHASES, Model(1e9), Links(8, 100e9, 10e9, sent=1e9))
    assert predict(slow, 4, 20, "one_step_off")["reshard"] == pytest.approx(2e9 * 0.5 / 100e9 + 2.0)
    with pytest.raises(ValueError, match="two GPUs"):
        predict(free, 1, 20, "one_step_off")
    with pytest.raises(ValueError, match="there are colocated, separate, one_step_off"):
        predict(free, 4, 20, "elsewhere")


def test_the_table_goes_to_1024_gpus_and_the_controller_limits_it():
    rows = table(CASE, (1, 2, 1024), None, per_gpu=10)
    assert {row["gpus"] for row in rows} == {1, 2, 1024}
    by = {(row["gpus"], row["placement"]): row for row in rows}
    assert by[1, "colocated"]["efficiency"] == pytest.approx(1.0)
    assert by[1024, "colocated"]["controller"] == pytest.approx(102.4)
    assert by[1024, "colocated"]["efficiency"] < by[2, "colocated"]["efficiency"] < 1
    assert (1, "separate") not in by and (2, "one_step_off") in by
    assert by[1024, "one_step_off"]["makers"] in range(128, 897, 128)
    assert by[1024, "one_step_off"]["step"] <= predict(CASE, 1024, 10240, "one_step_off")["step"]


def test_the_example_file_is_read():
    file = BENCHMARKS / "scale_model.json"
    case = Case.load(file)
    assert case.links.gpus_per_node == json.loads(file.read_text())["links"]["gpus_per_node"]
    assert predict(case, 1, 256)["step"] == pytest.approx(1.05 + 0.22 + 0.05 + 0.66 + 256 * 0.0002)
