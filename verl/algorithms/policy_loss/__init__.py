"""Policy losses; importing the package registers them all.

Signature: ``fn(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config=None, rollout_is_weights=None)
-> (loss, metrics)``, tensors (B, R). Denominators come from the ambient `verl.algorithms.aggregation.use_counts`.
"""

from verl.algorithms.policy_loss.cispo import cispo
from verl.algorithms.policy_loss.covariance import clip_cov, kl_cov
from verl.algorithms.policy_loss.dppo import dppo_kl, dppo_tv
from verl.algorithms.policy_loss.gpg import gpg
from verl.algorithms.policy_loss.sapo import sapo
from verl.algorithms.policy_loss.sequence import geo_mean, gspo
from verl.algorithms.policy_loss.vanilla import vanilla

__all__ = ["cispo", "clip_cov", "dppo_kl", "dppo_tv", "geo_mean", "gpg", "gspo", "kl_cov", "sapo", "vanilla"]
