"""Configuration: a dataclass tree with verl's public key names, read from files, dicts and Hydra overrides.

Usual use::

    config = load_config(["data.train_files=train.parquet", "actor_rollout_ref.model.path=my/model"])
    validate(config)          # every problem at once
    config = resolve(config)  # what follows from other values

Nothing here imports torch.
"""

from verl.config.checks import validate
from verl.config.derived import (
    MicroBatching,
    clip_range,
    family,
    fit_batch_to_rows,
    generates,
    max_sequence_length,
    micro_batching,
    needs_critic,
    needs_old_log_probs,
    needs_reference,
    optimizer_steps_per_rollout,
    own_pools,
    processes,
    resolve,
    samples_per_step,
    tokenizer_path,
)
from verl.config.load import load_config
from verl.config.presets import PRESETS
from verl.config.printing import changed, flatten, job, to_dict, to_yaml
from verl.config.tree import GROUPS, LEAVES, Config

__all__ = [
    "GROUPS",
    "LEAVES",
    "PRESETS",
    "Config",
    "MicroBatching",
    "changed",
    "clip_range",
    "family",
    "fit_batch_to_rows",
    "flatten",
    "generates",
    "job",
    "load_config",
    "max_sequence_length",
    "micro_batching",
    "needs_critic",
    "needs_old_log_probs",
    "needs_reference",
    "optimizer_steps_per_rollout",
    "own_pools",
    "processes",
    "resolve",
    "samples_per_step",
    "to_dict",
    "to_yaml",
    "tokenizer_path",
    "validate",
]
