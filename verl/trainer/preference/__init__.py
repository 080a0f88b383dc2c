"""Learning from pairs and from labelled answers as tables: the reference's log-probs, the plan, the update."""

from __future__ import annotations

from functools import partial

from verl.config import Config, needs_reference
from verl.dataflow import Dataflow, Node
from verl.trainer.learners import LearnerRoles
from verl.trainer.ppo.keys import SEQUENCE
from verl.trainer.preference import nodes
from verl.workers.pairs import PAIR

STATE = ("actor.weights", "ref.weights")
PAIR_REFERENCE = ["ref_chosen", "ref_rejected"]
MISMATCHED = ["kl_responses", "kl_mask", "kl_attention"]
KL_RENAMED = {
    "responses": "kl_responses",
    "response_mask": "kl_mask",
    "attention_mask": "kl_attention",
    "ref": "ref_kl",
}
LABELLED = [*SEQUENCE, "label"]


def pairs(roles: LearnerRoles, config: Config) -> Dataflow:
    """The training step of DPO and its family."""
    known = PAIR_REFERENCE if config.preference.precompute_ref_log_probs else []
    return Dataflow(*pair_update(roles, config), inputs={"pair": [*PAIR, *known]}, state=STATE)


def pair_update(roles: LearnerRoles, config: Config) -> list[Node]:
    """From pairs to new weights."""
    preference = config.preference
    ref = PAIR_REFERENCE if needs_reference(config) else []
    asked, every = ref and not preference.precompute_ref_log_probs, preference.ref_model_sync_steps
    table = [
        asked and Node("ref_logp", roles.ref_pairs, PAIR, ref, frame="pair", reads=["ref.weights"],
             pool=roles.pool_of("reference")),
        Node("plan", partial(nodes.plan_pairs, config=config), PAIR, ["step/plan"], frame="pair"),
        Node("update_actor", roles.update_pairs, [*PAIR, *ref, "step/plan"], frame="pair",
             writes=["actor.weights"], pool="actor"),
        preference.sync_ref_model and Node(
            "sync_ref", roles.sync_reference, [], frame="step", reads=["actor.weights"], writes=["ref.weights"],
            pool="actor", when=lambda step: step % every == 0, params={"alpha": preference.ref_model_mixup_alpha}),
    ]  # fmt: skip
    return [node for node in table if node]


def labelled(roles: LearnerRoles, config: Config) -> Dataflow:
    """The training step of KTO and its kin."""
    known = ["ref"] if config.preference.precompute_ref_log_probs else []
    kl = [*MISMATCHED, "ref_kl"] if config.preference.loss_type == "kto" else []
    update = [*LABELLED, "ref", *kl, "step/plan"]
    return Dataflow(
        *labelled_reference(roles, config, known),
        Node("update_actor", roles.update_labelled, update, writes=["actor.weights"], pool="actor"),
        inputs={"sample": [*LABELLED, *known]},
        state=STATE,
    )


def labelled_reference(roles: LearnerRoles, config: Config, known: list[str]) -> list[Node]:
    """The plan, the mismatched answers of KTO's KL, and the reference's log-probs of both."""
    kto = config.preference.loss_type == "kto"
    ask, read = roles.ref_labelled, {"reads": ["ref.weights"], "pool": roles.pool_of("reference")}
    others = ["prompts", *MISMATCHED]
    table = [
        Node("plan", partial(nodes.plan_labelled, config=config), SEQUENCE, ["step/plan"]),
        kto and Node("mismatch", nodes.mismatch, [*SEQUENCE, "step/plan"], MISMATCHED),
        not known and Node("ref_logp", ask, SEQUENCE, ["ref"], **read),
        kto and Node("ref_kl_logp", ask, others, ["ref_kl"], rename=KL_RENAMED, **read),
    ]
    return [node for node in table if node]


def pair_validation(roles: LearnerRoles, config: Config) -> Dataflow:
    """The loss of the validation pairs, and how often the chosen answer is preferred."""
    ref = PAIR_REFERENCE if needs_reference(config) else []
    policy, known = ["policy_chosen", "policy_rejected"], ref if config.preference.precompute_ref_log_probs else []
    table = [
        ref and not known and Node("ref_logp", roles.ref_pairs, PAIR, ref, frame="pair", reads=["ref.weights"],
             pool=roles.pool_of("reference")),
        Node("logp", roles.policy_pairs, PAIR, policy, frame="pair", reads=["actor.weights"], pool="actor"),
        Node("evaluate", partial(nodes.evaluate_pairs, settings=roles.preference), [*PAIR, *policy, *ref],
             frame="pair"),
    ]  # fmt: skip
    return Dataflow(*(node for node in table if node), inputs={"pair": [*PAIR, *known]}, state=STATE, name="validate")


def labelled_validation(roles: LearnerRoles, config: Config) -> Dataflow:
    """The same for labelled answers."""
    kto = config.preference.loss_type == "kto"
    kl = ["ref_kl", "policy_kl"] if kto else []
    read = {"reads": ["actor.weights"], "pool": "actor"}
    renamed = {**{name: key for name, key in KL_RENAMED.items() if name != "ref"}, "policy": "policy_kl"}
    evaluate = partial(nodes.evaluate_labelled, settings=roles.preference)
    known = ["ref"] if config.preference.precompute_ref_log_probs else []
    table = [
        *labelled_reference(roles, config, known),
        Node("logp", roles.policy_labelled, SEQUENCE, ["policy"], **read),
        kto and Node("kl_logp", roles.policy_labelled, ["prompts", *MISMATCHED], ["policy_kl"], rename=renamed, **read),
        Node("evaluate", evaluate, ["response_mask", "label", "ref", "policy", *kl]),
    ]
    return Dataflow(*(n for n in table if n), inputs={"sample": [*LABELLED, *known]}, state=STATE, name="validate")
