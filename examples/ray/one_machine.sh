#!/usr/bin/env bash
# PPO on one machine with four GPUs; the critic has a GPU of its own and works beside the policy.
# Ray is started for the run and ended with it.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}
DATA=${DATA:-$HOME/data/gsm8k}

verl train algorithm.name=ppo \
  data.train_files="$DATA/train.parquet" data.val_files="$DATA/test.parquet" \
  actor_rollout_ref.model.path="$MODEL" \
  trainer.n_gpus_per_node=3 critic.enable_resource_pool=true critic.n_gpus_per_node=1 "$@"
