"""The memory plan where weights are spread over devices."""

from __future__ import annotations

from dataclasses import replace

from verl.hardware.memory import GIB, ModelShape, Workload, lora_parameters, phases

SHAPE = ModelShape(7_615_616_512, 28, 3584, 18944, 3584, 512, 152064)
WORK = Workload(2, 140 * GIB, True, True, 8192, 8192, 0.8, SHAPE.parameters, 128, 1024, flash=True, checkpointing=True)


def parts(work: Workload) -> dict[str, dict[str, int]]:
    return {phase.name: phase.parts for phase in phases(SHAPE, work)}


def test_masters_moments_and_gradients_are_divided_and_the_rollout_is_whole():
    one, two = parts(WORK), parts(replace(WORK, shards=2))
    for name in ("fp32 masters", "optimizer moments", "fp32 gradients"):
        assert two["update"][name] * 2 == one["update"][name]
    assert "weights" not in two["update"], "the shards are the weights"
    assert two["rollout"]["rollout's weights"] == one["rollout"]["weights"]
    assert two["update"]["gathered weights"] > two["log-probs"]["gathered weights"] > 0
    assert sum(parts(replace(WORK, shards=8))["update"].values()) < sum(two["update"].values())


def test_frozen_weights_are_divided_in_the_type_that_computes():
    adapters = replace(WORK, trainable=lora_parameters(SHAPE, 16))
    two = parts(replace(adapters, shards=2))
    assert two["update"]["frozen weights"] == SHAPE.parameters
    assert two["update"]["fp32 masters"] == adapters.trainable * 2
    reference = parts(replace(WORK, reference=True, shards=4))
    assert reference["update"]["reference"] == SHAPE.parameters * 2 // 4
