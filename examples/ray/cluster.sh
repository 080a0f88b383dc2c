#!/usr/bin/env bash
# GRPO on two machines with four GPUs each, joined by Ray.
#
# Once on the first machine:     ray start --head --port=6379
# Once on every other machine:   ray start --address=FIRST_MACHINE:6379
# Then, on the first machine:    bash examples/ray/cluster.sh
#
# Every machine needs the same Python environment, and the same paths for the model, the data and RUN (a shared folder).
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-7B-Instruct}
DATA=${DATA:-$HOME/data/gsm8k}
RUN=${RUN:-$PWD/checkpoints/gsm8k-7b}

verl train algorithm.name=grpo \
  data.train_files="$DATA/train.parquet" data.val_files="$DATA/test.parquet" \
  data.train_batch_size=512 data.max_prompt_length=512 data.max_response_length=1024 \
  actor_rollout_ref.model.path="$MODEL" actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.actor.ppo_mini_batch_size=128 \
  trainer.ray_address=auto trainer.nnodes=2 trainer.n_gpus_per_node=4 \
  trainer.save_freq=20 trainer.test_freq=20 trainer.max_restarts=3 \
  trainer.default_local_dir="$RUN" "$@"
