"""Files that a configuration names: which are missing, and what lies nearby."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from verl.config.derived import needs_critic
from verl.config.suggest import near_path
from verl.config.tree import Config

_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?(:[\w.-]+)?")
_DATA_FILE = re.compile(r"\.(parquet|jsonl?|arrow|csv|tsv|txt|gz|zst)$", re.IGNORECASE)


def missing_files(config: Config, *, need_data: bool, need_model: bool) -> Iterator[str]:
    """A sentence for each file or folder that is required and not given, or given and not there."""
    data, reward, trainer = config.data, config.reward, config.trainer
    model = config.actor_rollout_ref.model
    if not data.train_files and need_data and not trainer.val_only:
        yield "data.train_files is not set: name a parquet or jsonl file, a folder, or a hub data set"
    if not model.path and need_model:
        yield "actor_rollout_ref.model.path is not set: name a model folder or a hub model"
    for key, value in (
        ("data.train_files", data.train_files),
        ("data.val_files", data.val_files),
        ("sft.train_files", config.sft.train_files),
    ):
        for path in _listed(value):
            if _is_local(path, data=True) and not Path(path).exists():
                yield _missing(key, path, "no such file or folder")
    models = [
        ("actor_rollout_ref.model.path", model.path),
        ("actor_rollout_ref.model.tokenizer_path", model.tokenizer_path),
    ]
    models += [("data.tokenizer", data.tokenizer)]
    models += [("critic.model.path", config.critic.model.path)] if needs_critic(config) else []
    models += [("reward_model.model.path", config.reward_model.model.path)] if config.reward_model.enable else []
    models += [("preference.ref_model_path", config.preference.ref_model_path)]
    models += [("distillation.teacher_path", config.distillation.teacher_path)]
    for key, path in models:
        if path and _is_local(path, data=False) and not Path(path).exists():
            yield _missing(key, path, "no such folder", folders=True)
    for key, path in (
        ("data.custom_cls.path", data.custom_cls.path),
        ("critic.model.custom_cls.path", config.critic.model.custom_cls.path),
        ("reward.custom_reward_function.path", reward.custom_reward_function.path),
        ("algorithm.custom_path", config.algorithm.custom_path),
        ("trainer.sample_prompts", trainer.sample_prompts if isinstance(trainer.sample_prompts, str) else None),
    ):
        if path is not None and Path(path).is_dir():
            yield f"{key}={path} is a folder: name the file in it"
        elif path is not None and not Path(path).is_file():
            yield _missing(key, path, "no such file")


def _listed(value: str | list[str] | None) -> list[str]:
    return value if isinstance(value, list) else [value] if value else []


def _is_local(path: str, *, data: bool) -> bool:
    """Whether the text can only mean a place on this machine; ``owner/name`` may be on the hub."""
    if "://" in path:
        return False
    if not _HUB_NAME.fullmatch(path) or (data and _DATA_FILE.search(path)):
        return True
    return "/" in path and Path(path).parent.is_dir()


def _missing(key: str, path: str, what: str, *, folders: bool = False) -> str:
    near = near_path(path, folders=folders)
    return f"{key}={path}: {what}" + (f"; did you mean {near}?" if near else f" (working directory {Path.cwd()})")
