"""The nodes that make samples: generate and score, ReMax's greedy baseline, dynamic sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from verl.config import Config
from verl.dataflow import Dataflow, Loop, Node, expand, subset
from verl.protocol import DataProto
from verl.rollout.base import SamplingParams
from verl.trainer import nodes
from verl.trainer.ppo.keys import ROLLOUT, SCORES, SEQUENCE, STATE, TURNS
from verl.trainer.roles import Roles
from verl.trainer.settings import train_sampling

NO_LIMIT = 1_000_000  # draws of one step when algorithm.filter_groups.max_num_gen_batches is 0


def prompt_inputs(columns: Sequence[str]) -> dict[str, list[str]]:
    return {"prompt": ["prompt_ids", *columns]}


def rollout_nodes(
    roles: Roles,
    columns: Sequence[str],
    n: int,
    sampling: SamplingParams,
    several_turns: bool = False,
    ahead: bool = False,
) -> list[Node]:
    """Generate and score, streamed row by row where the reward function allows it. In ``several_turns`` the
    environment reads the row's columns, and scores may depend on the number of turns. ``ahead``: see Node."""
    turns = [TURNS] if several_turns else []
    generate = Node(
        "generate",
        roles.generate,
        needs=["prompt_ids", *columns] if several_turns else ["prompt_ids"],
        gives=[*ROLLOUT, *turns],
        relation=expand(n),
        reads=["actor.weights"],
        pool=roles.pool_of("rollout"),
        per_row=True,
        params={"n": n, "sampling": sampling},
        ahead=ahead,
    )
    score = Node(
        "score",
        roles.score,
        needs=[*SEQUENCE, *turns, *(f"prompt/{name}" for name in columns)],
        gives=SCORES,
        pool="reward",
        per_row=roles.reward is not None and roles.reward.per_row,
        ahead=ahead,
    )
    return [generate, score]


def greedy_baseline(roles: Roles, config: Config) -> list[Node]:
    """ReMax: the score of each prompt's greedy response, in frame prompt."""
    greedy = {name: f"greedy_{name}" for name in ROLLOUT if name != "finish_reason"}
    scored = {name: f"greedy_{name}" for name in SCORES}
    sampling = replace(train_sampling(config), temperature=0.0, top_k=-1, top_p=1.0, min_p=0.0)
    ahead = runs_ahead(config)
    judged = {name: scored[name] for name in ("token_level_scores", "score_valid")}
    judged["response_mask"] = greedy["response_mask"]
    return [
        Node(
            "generate_greedy",
            roles.generate_greedy,
            needs=["prompt_ids"],
            gives=[*greedy.values()],
            frame="prompt",
            reads=["actor.weights"],
            pool=roles.pool_of("rollout"),
            params={"sampling": sampling},
            rename=greedy,
            ahead=ahead,
        ),
        Node(
            "score_greedy",
            roles.score,
            needs=[*(greedy[name] for name in SEQUENCE), *roles.prompt_columns],
            gives=[*scored.values()],
            frame="prompt",
            pool="reward",
            rename={**{name: greedy[name] for name in SEQUENCE}, **scored},
            ahead=ahead,
        ),
        Node("baseline", nodes.baseline, [*judged.values()], ["reward_baselines"], frame="prompt", rename=judged,
             ahead=ahead),
    ]  # fmt: skip


def runs_ahead(config: Config) -> bool:
    """Whether training samples are made one step ahead of their update."""
    return config.trainer.schedule == "one_step_off"


def dynamic_sampling(roles: Roles, config: Config, source: Callable[[int], DataProto | None]) -> Loop:
    """DAPO: draw prompts until the batch is full of groups whose responses do not all score the same."""
    groups, columns = config.algorithm.filter_groups, roles.prompt_columns
    several = config.actor_rollout_ref.rollout.multi_turn.enable
    needs = ["token_level_scores", "response_mask", "attention_mask", "score_valid", "reward_extra_info"]
    varied = partial(nodes.filter_groups, metric=groups.metric or "score", config=config)
    body = Dataflow(
        *rollout_nodes(roles, columns, config.actor_rollout_ref.rollout.n, train_sampling(config), several),
        Node("filter", varied, needs, relation=subset),
        inputs=prompt_inputs(columns),
        state=STATE,
        name="draw",
    )
    return Loop(
        "refill",
        body,
        source,
        limit=groups.max_num_gen_batches or NO_LIMIT,
        gives=[
            *ROLLOUT,
            *([TURNS] if several else []),
            *SCORES,
            *(f"prompt/{name}" for name in ("prompt_ids", *columns)),
        ],
        carry="save" if groups.carry else "drop",
        take=config.data.train_batch_size,
        on_limit=groups.on_limit,
        remedy="raise algorithm.filter_groups.max_num_gen_batches or data.gen_batch_size, or set "
        "algorithm.filter_groups.on_limit=smaller to go on with fewer",
        ahead=runs_ahead(config),
    )
