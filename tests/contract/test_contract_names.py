"""Table D: the names that public verl scripts use."""

from __future__ import annotations

import pytest

from verl import RayPPOTrainer
from verl.config import load_config, validate
from verl.errors import ConfigError

MODEL = "Qwen/Qwen1.5-0.5B"
NAMES = {
    "algorithm.adv_estimator": "gae grpo rloo reinforce_plus_plus reinforce_plus_plus_baseline remax opo grpo_passk "
    "gpg",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "vanilla gspo clip_cov kl_cov geo_mean cispo sapo gpg",
    "actor_rollout_ref.actor.kl_loss_type": "kl k1 abs mse k2 low_var_kl k3 kl+ k1+ abs+ mse+ k2+ low_var_kl+ k3+",
    "algorithm.kl_penalty": "kl k1 abs mse k2 low_var_kl k3 k3+",
    "actor_rollout_ref.actor.loss_agg_mode": "token-mean token-sum seq-mean-token-sum seq-mean-token-mean "
    "seq-mean-token-sum-norm",
    "algorithm.rollout_correction.rollout_is": "token sequence",
}
METRICS = """
actor/pg_loss actor/ppo_kl actor/pg_clipfrac actor/grad_norm actor/lr critic/score/mean critic/rewards/mean
critic/vf_loss critic/vf_explained_var critic/advantages/mean critic/returns/mean critic/values/mean
response_length/mean response_length/clip_ratio prompt_length/mean timing_s/gen timing_s/update_actor timing_s/step
timing_per_token_ms/gen perf/throughput perf/total_num_tokens perf/time_per_step training/global_step
"""
SIZES = ("actor_rollout_ref.model.path=owner/model", "actor_rollout_ref.rollout.n=4")
SCORES = {
    "number": "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n"
    "    assert isinstance(solution_str, str) and data_source == 'own' and kwargs == {'bonus': 3}\n"
    "    return float(ground_truth) + kwargs['bonus']\n",
    "async": "async def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n"
    "    return {'score': float(ground_truth) + 3, 'acc': 0.5}\n",
}


@pytest.mark.parametrize("key", NAMES)
def test_D_every_name_is_taken_and_others_are_not(key):
    for name in NAMES[key].split():
        load_config([f"{key}={name}", *SIZES])
    with pytest.raises(ConfigError, match="no_such_name"):
        validate(load_config([f"{key}=no_such_name", *SIZES]), need_data=False)


@pytest.mark.parametrize("kind", SCORES)
def test_D_a_reward_function_by_path_takes_effect_and_metrics_have_their_names(kind, hub_here, tmp_path, monkeypatch):
    """``custom_reward_function.path`` with ``compute_score``, sync or async, a number or a dict."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text(SCORES[kind])
    rows = [{"data_source": "own", "prompt": f"question {i}", "ground_truth": str(3 + 2 * i)} for i in range(2)]
    given = {"path": "reward.py", "name": "compute_score"}
    if kind == "number":
        given["reward_kwargs"] = {"bonus": 3}
    config = {
        "trainer": {"n_gpus_per_node": 1, "nnodes": 1, "total_training_steps": 1, "save_final": False},
        "actor_rollout": {"model_name": MODEL},
        "custom_reward_function": given,
        "data": {"max_response_length": 4},
    }
    metrics = RayPPOTrainer(config, train_rows=rows).fit()
    assert metrics["critic/score/mean"] == 7.0
    assert not set(METRICS.split()) - set(metrics), sorted(set(METRICS.split()) - set(metrics))
