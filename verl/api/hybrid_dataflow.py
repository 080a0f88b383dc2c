"""HybridDataflow: name the models, get the training step as a graph; look at it, change it, run it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.api.rl_trainer import RLTrainer
from verl.api.settings import OUTPUT, SEQUENCE_LENGTH, is_reward_model
from verl.config import Config, resolve
from verl.dataflow import Dataflow, Loop, Node
from verl.dataflow.executor import StepResult
from verl.errors import ConfigError
from verl.protocol import DataProto
from verl.rewards import inspect_function
from verl.trainer.ppo import ppo
from verl.trainer.roles import Roles


class HybridDataflow:
    """The dataflow of a training step. Nothing is loaded until it runs: looking and changing are free.

    Args:
        actor_model: folder or hub name of the policy.
        reward_model: a reward model (folder, hub name, object) or a reward function, as ``RLTrainer(reward_fn=)``.
        critic_model: folder or hub name of the value model; one without a value head gets a fresh one (notice). None:
            the policy's model, where the algorithm has a critic.
        rollout_batch_size: responses of a step in all.
        num_rollout_workers: replicas that generate.
        settings: further parameters of :class:`verl.RLTrainer`.

    A node of your own::

        flow = HybridDataflow(actor_model="Qwen/Qwen2-0.5B", reward_model=score)
        flow.add(Node("length", lambda b: count(b), needs=["response_mask"], gives=["length"]), after="generate")
        print(flow.describe(gpu="RTX 3090"))
        metrics = flow.step()
    """

    def __init__(
        self,
        actor_model: str | None = None,
        reward_model: Any = None,
        critic_model: str | None = None,
        rollout_batch_size: int | None = None,
        num_rollout_workers: int | None = None,
        *,
        algorithm: str = "ppo",
        max_seq_len: int = SEQUENCE_LENGTH,
        output_dir: str = OUTPUT,
        **settings: Any,
    ):
        self._changes: list[Callable[[Dataflow], Dataflow]] = []
        config = dict(settings.pop("config", None) or {})
        if critic_model is not None:
            config["critic.model.path"] = critic_model
        self._runner = RLTrainer(
            actor_model,
            reward_model,
            algorithm=algorithm,
            rollout_batch_size=rollout_batch_size,
            num_rollout_workers=num_rollout_workers,
            max_seq_len=max_seq_len,
            output_dir=output_dir,
            change_flow=lambda flow, _: self._changed(flow),
            config=config,
            **settings,
        )
        self._sketch: Dataflow = _sketch(self._runner.config, self._runner.prompt_columns(), reward_model)
        if critic_model is not None and not self._has("values"):
            raise ConfigError(f"algorithm={algorithm!r} has no critic: leave critic_model={critic_model!r} out")

    # ---- looking and changing ------------------------------------------------------------------------------------

    @property
    def graph(self) -> Dataflow:
        """The step's graph: of the loaded models once there are any, before that a sketch with the same nodes."""
        if self._runner._trainer is not None:
            return self._runner._trainer.flows.flow("train", self._runner.global_steps + 1)
        return self._sketch

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes' names, in the order of the table."""
        return tuple(node.name for node in self.graph.nodes)

    def add(self, node: Node | Loop, *, after: str | None = None, before: str | None = None) -> HybridDataflow:
        """Add a node; the graph is checked at once, before anything is loaded.

        Raises:
            DataflowError: names a cycle, a missing key, a key that two nodes give, an unknown state or frame.
        """
        return self._change(lambda flow: flow.with_node(node, after=after, before=before))

    def remove(self, name: str) -> HybridDataflow:
        """Take a node out. Raises DataflowError where another one needs what it gives."""
        return self._change(lambda flow: flow.without(name))

    def describe(self, gpu: str | None = None) -> str:
        """Models, device, and the nodes in running order, with pools, keys, state and seconds.

        Args:
            gpu: expect the seconds of this GPU ("RTX 3090", as ``verl plan --gpu``). None: the seconds of the last
                step; before the first one what this machine's GPU is expected to need, if it is one that is known.

        Raises:
            ConfigError: the GPU is not known.
        """
        config, trainer = self._runner.config, self._runner._trainer
        parts = {"actor": config.actor_rollout_ref.model.path or "the quick start's model"}
        if self._has("values"):
            parts["critic"] = config.critic.model.path or parts["actor"]
        if self._has("ref_logp"):
            parts["reference"] = parts["actor"]
        device = trainer.plan.choice.device.described if trainer is not None else "decided when the models are loaded"
        models = "".join(f"{role:10} {path}\n" for role, path in parts.items())
        seconds, of = self._seconds(gpu)
        head = f"{models}{'device':10} {device}\n{'seconds':10} {of}\n"
        return head + self.graph.describe(seconds)

    def _seconds(self, gpu: str | None) -> tuple[dict[str, float], str]:
        """Seconds by node, and what they are."""
        if gpu is None and self.graph.timings:
            return self.graph.timings, "of the last step"
        from verl.trainer.planning import card, card_of, expected_seconds, imagined
        from verl.trainer.settings import hardware_for

        config = resolve(self._runner.config)
        found = card(gpu) if gpu else None
        choice = hardware_for(config, imagined(found) if found else None)
        found = found or card_of(choice)
        if found is None or config.actor_rollout_ref.model.path is None:
            return {}, "known after the first step; describe(gpu=...) tells what a GPU is expected to need"
        seconds = expected_seconds(config, choice, found)
        return seconds, f"expected on {found.name} if every response is full: {sum(seconds.values()):.1f} in all"

    def to_mermaid(self) -> str:
        """The graph as a Mermaid flowchart."""
        return self.graph.to_mermaid()

    # ---- running -------------------------------------------------------------------------------------------------

    def step(self) -> dict[str, float]:
        """One training step on the next prompts; its metrics, as :meth:`verl.RLTrainer.train_step`."""
        return self._runner.train_step()

    def run(self, batch: DataProto | Sequence[Any]) -> StepResult:
        """One training step on these prompts: a prompt batch, or texts, lists of messages or rows.

        Returns:
            What the step made: ``result["sample"]`` and ``result["prompt"]`` are batches, ``result.metrics``.
        """
        trainer = self._runner.trainer
        if not isinstance(batch, DataProto):
            from verl.trainer.halves import prompt_batch

            columns = trainer.plan.prompt_columns
            batch = prompt_batch(trainer, batch, prefix=f"f{trainer.global_steps}.", columns=columns)
        return trainer.train_step(batch)

    def save(self, dir: str | Path | None = None) -> Path:
        """Write a checkpoint, see :meth:`verl.RLTrainer.save`."""
        return self._runner.save(dir)

    def close(self) -> None:
        """End the run, see :meth:`verl.RLTrainer.close`."""
        self._runner.close()

    # ---- parts ---------------------------------------------------------------------------------------------------

    def _has(self, node: str) -> bool:
        return any(each.name == node for each in self._sketch.nodes)

    def _change(self, change: Callable[[Dataflow], Dataflow]) -> HybridDataflow:
        if self._runner._trainer is not None:
            raise ConfigError("the models are loaded already: change the graph before its first step")
        self._sketch = change(self._sketch).validate()
        self._changes.append(change)
        return self

    def _changed(self, flow: Dataflow) -> Dataflow:
        for change in self._changes:
            flow = change(flow)
        return flow


@dataclass(frozen=True)
class _SketchReward:
    per_row: bool


def _sketch(config: Config, columns: Sequence[str], reward: Any) -> Dataflow:
    """The step's table over roles that are not there yet."""

    def not_loaded(*_: Any, **__: Any) -> Any:
        raise AssertionError("a sketch is looked at, not run")

    per_row = reward is None or (not is_reward_model(reward) and inspect_function(reward).style == "row")
    worker: Any = not_loaded
    roles = Roles(
        actor=worker,
        reference=worker,
        critic=worker,
        reward=_SketchReward(per_row),  # type: ignore[arg-type]
        kl_controller=worker,
        prompt_columns=tuple(columns),
        dump_folder=Path("."),
    )
    return ppo(roles, resolve(config), source=not_loaded).validate()
