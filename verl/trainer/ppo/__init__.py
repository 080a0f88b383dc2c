"""PPO and its kin as a table of nodes. Algorithms differ in which nodes are there, and in the configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from verl.config import Config
from verl.dataflow import Dataflow, Loop, Node
from verl.protocol import DataProto
from verl.trainer import nodes
from verl.trainer.ppo.keys import OUTPUTS, ROLLOUT, SCORES, SEQUENCE, STATE, Keys
from verl.trainer.ppo.rollouts import dynamic_sampling, greedy_baseline, prompt_inputs, rollout_nodes, runs_ahead
from verl.trainer.roles import Roles
from verl.trainer.settings import train_sampling, validation_sampling


def ppo(roles: Roles, config: Config, source: Callable[[int], DataProto | None]) -> Dataflow:
    """The training step. ``source(k)`` draws more prompts where dynamic sampling is on."""
    refill = config.algorithm.filter_groups
    return Dataflow(
        *rollout_half(roles, config, source),
        *update_half(roles, config),
        inputs=prompt_inputs(roles.prompt_columns),
        state=STATE,
        outputs=OUTPUTS,
        staleness={"actor.weights": 1} if runs_ahead(config) or (refill.enable and refill.carry) else None,
    )


def rollout_half(roles: Roles, config: Config, source: Callable[[int], DataProto | None]) -> list[Node | Loop]:
    """From prompts to scored samples."""
    rollout, columns = config.actor_rollout_ref.rollout, roles.prompt_columns
    several, ahead = rollout.multi_turn.enable, runs_ahead(config)
    one_draw = rollout_nodes(roles, columns, rollout.n, train_sampling(config), several, ahead)
    return [
        *([dynamic_sampling(roles, config, source)] if config.algorithm.filter_groups.enable else one_draw),
        *(greedy_baseline(roles, config) if Keys(config).baseline else []),
    ]


def update_half(roles: Roles, config: Config) -> list[Node]:
    """From scored samples to new weights."""
    k, warm, kl = Keys(config), config.trainer.critic_warmup, roles.kl_controller
    mask, bind = k.rename, partial(partial, config=config)
    critic, reference = roles.pool_of("critic"), roles.pool_of("reference")
    table = [
        k.old and Node("old_logp", roles.old_log_prob, SEQUENCE, k.old, reads=["actor.weights"], pool="actor"),
        k.ref and Node("ref_logp", roles.ref_log_prob, SEQUENCE, k.ref, reads=["ref.weights"], pool=reference),
        k.values and Node("values", roles.values, SEQUENCE, k.values, reads=["critic.weights"], pool=critic),
        k.corrected and Node("correct", bind(nodes.correct), k.correction, [*k.weights, k.mask]),
        Node("shape", bind(nodes.shape_rewards, kl_controller=kl), k.scores, k.rewards, writes=["kl_coef"]),
        Node("advantage", bind(nodes.advantages), k.advantage, ["advantages", "returns"]),
        Node("plan", bind(nodes.make_plans), k.trained, ["step/plan"], rename=mask),
        k.values and Node("critic_plan", bind(nodes.make_critic_plan), k.trained, ["step/critic_plan"], rename=mask),
        k.values and Node("update_critic", roles.update_critic, k.critic_update, rename=mask,
                          writes=["critic.weights"], pool=critic),
        Node("update_actor", roles.update_actor, k.actor_update, writes=["actor.weights"], pool="actor", rename=mask,
             when=(lambda step: step > warm) if warm else None),
        Node("metrics", bind(nodes.batch_metrics), k.measured),
    ]  # fmt: skip
    return [node for node in table if node]


def validation_flow(roles: Roles, config: Config, columns: Sequence[str]) -> Dataflow:
    """Generate and score; nothing is written."""
    rollout = config.actor_rollout_ref.rollout
    sampling = validation_sampling(config)
    table = rollout_nodes(roles, columns, rollout.val_kwargs.n, sampling, rollout.multi_turn.enable)
    outputs = [*ROLLOUT, *SCORES]
    return Dataflow(*table, inputs=prompt_inputs(columns), state=STATE, name="validate", outputs=outputs)


def preview_flow(roles: Roles, config: Config, columns: Sequence[str]) -> Dataflow:
    """Answers to the user's own prompts, without a score."""
    rollout, sampling = config.actor_rollout_ref.rollout, validation_sampling(config)
    generate, _ = rollout_nodes(roles, columns, rollout.val_kwargs.n, sampling, rollout.multi_turn.enable)
    return Dataflow(generate, inputs=prompt_inputs(columns), state=STATE, name="preview", outputs=ROLLOUT)
