"""The same log-probs through TRL's own loss code: values and gradients agree to 1e-5 in fp32.

Needs trl 1.16.0, which is no dependency: skipped without it. Its trainers' loss methods are run on a stand-in that
holds the settings and a stand-in model that returns given log-probs. Differences that are meant are tested as such.
"""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from verl.algorithms.preference import (
    PairRows,
    PreferenceSettings,
    UnpairedLogps,
    pair_logps,
    pair_loss,
    prepare,
    unpaired_loss,
    wpo_weights,
)

trl = pytest.importorskip("trl", reason="the peer is not installed: pip install trl==1.16.0")
if trl.__version__ != "1.16.0":
    pytest.skip(f"the peer is trl 1.16.0, not {trl.__version__}", allow_module_level=True)

from trl.experimental.cpo import CPOTrainer  # noqa: E402
from trl.experimental.orpo import ORPOTrainer  # noqa: E402
from trl.trainer.dpo_trainer import DPOTrainer  # noqa: E402
from trl.trainer.kto_trainer import KTOTrainer  # noqa: E402

torch.set_num_threads(1)
B, P, R = 5, 3, 7
LENGTHS = torch.tensor([4, 7, 2, 5, 3, 6, 1, 7, 4, 4])  # chosen, then rejected


def grids(seed=0):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(R)[None] < LENGTHS[:, None]
    policy, ref, squares = (-3 * torch.rand(2 * B, R, generator=generator) * mask for _ in range(3))
    return policy.requires_grad_(), ref, squares, mask


ACCELERATOR = SimpleNamespace(
    device=torch.device("cpu"), gather=lambda t: t, gather_for_metrics=lambda t: t, unwrap_model=lambda m: m
)


class Model(torch.nn.Module):
    """Returns given log-probs (2B, P + R - 1): zeros where the prompt is predicted."""

    is_gradient_checkpointing = False

    def __init__(self, log_probs, squares):
        super().__init__()
        before = torch.zeros(len(log_probs), P - 1)
        grid = torch.cat([before, log_probs], 1)
        squared = torch.cat([before, squares], 1)
        zeros = torch.zeros_like(grid)
        self.output = SimpleNamespace(
            log_probs=grid, log_sum_sq_probs=squared, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool()
        )

    def forward(self, **kwargs):
        return self.output


def dpo_of_trl(policy, ref, squares, mask, loss_type, **settings):
    completion = torch.cat([torch.zeros(2 * B, P, dtype=torch.long), mask.long()], 1)
    inputs = {
        "input_ids": torch.ones_like(completion),
        "attention_mask": torch.ones_like(completion),
        "completion_mask": completion,
    }
    loss_types = loss_type if isinstance(loss_type, list) else [loss_type]
    defaults = {
        "beta": 0.1,
        "label_smoothing": 0.0,
        "ld_alpha": None,
        "use_weighting": False,
        "loss_weights": [1.0] * len(loss_types),
        "precompute_ref_logps": False,
        "f_divergence_type": "reverse_kl",
        "aux_loss_enabled": False,
    }
    fake = SimpleNamespace(
        **{**defaults, **settings},
        loss_types=loss_types,
        accelerator=ACCELERATOR,
        model=Model(policy * mask, squares),
        ref_model=Model(ref, squares),
        args=SimpleNamespace(gradient_checkpointing=False, gradient_checkpointing_kwargs=None, discopop_tau=0.05),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
    )
    loss = DPOTrainer._compute_loss(fake, fake.model, inputs, False)
    return loss, {key: value[-1] for key, value in fake._metrics["train"].items()}


def dpo_of_ours(policy, ref, squares, mask, loss_type, **settings):
    s = PreferenceSettings(loss_type, **settings)
    names = [f"p{k}" for k in range(B)]
    rows = PairRows.of(names * 2, ["chosen"] * B + ["rejected"] * B)
    x = pair_logps(policy, ref, mask, rows, ld_alpha=s.ld_alpha)
    weights = None
    if s.use_weighting:
        chosen, rejected = wpo_weights(policy, squares, mask).chunk(2)
        weights = chosen * rejected
    return pair_loss(x, s, prepare(x, s)[0], weights=weights)


def assert_equal(ours, theirs, leaf):
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5, abs=1e-6)
    mine, other = (torch.autograd.grad(loss, leaf, retain_graph=True)[0] for loss in (ours, theirs))
    torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("loss_type", "settings"),
    [
        ("sigmoid", {}),
        ("sigmoid_norm", {}),
        ("hinge", {}),
        ("ipo", {}),
        ("robust", {"label_smoothing": 0.2}),
        ("exo_pair", {"label_smoothing": 0.1}),
        ("nca_pair", {}),
        ("sppo_hard", {}),
        ("aot", {"label_smoothing": 0.1}),
        ("aot_unpaired", {}),
        ("apo_zero", {}),
        ("apo_down", {}),
        ("discopop", {}),
        ("sigmoid", {"ld_alpha": 0.3}),
        ("sigmoid", {"use_weighting": True}),
    ],
)
def test_pair_losses(loss_type, settings):
    data = grids()
    theirs, their_metrics = dpo_of_trl(*data, loss_type, beta=0.3, **settings)
    ours, metrics = dpo_of_ours(*data, loss_type, beta=0.3, **settings)
    assert_equal(ours, theirs, data[0])
    names = ["logps/chosen", "logps/rejected"]
    if loss_type not in ("ipo", "sigmoid_norm"):
        names += [f"rewards/{name}" for name in ("chosen", "rejected", "margins", "accuracies")]
    assert {name: metrics[name] for name in names} == pytest.approx({n: their_metrics[n] for n in names}, rel=1e-5)


def test_bco_pair_is_theirs_with_shift_zero():
    policy, ref, squares, mask = grids()
    rows = PairRows.of([*"abcde", *"abcde"], ["chosen"] * B + ["rejected"] * B)
    x = pair_logps(policy, ref, mask, rows)
    ours, _ = pair_loss(x, PreferenceSettings("bco_pair"), {"delta": torch.zeros(B)})
    assert_equal(ours, dpo_of_trl(policy, ref, squares, mask, "bco_pair")[0], policy)


def test_their_sigmoid_ignores_label_smoothing_and_ours_does_not():
    data = grids()
    theirs = dpo_of_trl(*data, "sigmoid", label_smoothing=0.2)[0].item()
    assert theirs == dpo_of_trl(*data, "sigmoid")[0].item()
    assert dpo_of_ours(*data, "sigmoid", label_smoothing=0.2)[0].item() != pytest.approx(theirs, rel=1e-3)


def test_sft_term_is_per_row_here_and_per_token_of_the_micro_batch_there():
    data = grids()
    policy, mask = data[0].detach(), data[3]
    theirs = dpo_of_trl(*data, ["sigmoid", "sft"], loss_weights=[1.0, 0.5])[0]
    ours = dpo_of_ours(*data, "sigmoid", rpo_alpha=0.5)[0]
    chosen, lengths = -policy[:B].sum(1), mask[:B].sum(1)
    difference = 0.5 * ((chosen / lengths).mean() - chosen.sum() / lengths.sum())
    assert (ours - theirs).item() == pytest.approx(difference.item(), abs=1e-5) and abs(difference) > 1e-3


@pytest.mark.parametrize("name", ["simpo", "cpo"])
def test_simpo_and_cpo(name):
    policy, _, _, mask = grids()
    rows = PairRows.of([*"abcde", *"abcde"], ["chosen"] * B + ["rejected"] * B)
    x = pair_logps(policy, None, mask, rows)
    seen = x.averaged() if name == "simpo" else x  # CPOTrainer averages for simpo before its loss
    fake = SimpleNamespace(
        alpha=0.0, accelerator=ACCELERATOR, beta=0.4, simpo_gamma=0.6, label_smoothing=0.1, loss_type="simpo"
    )
    fake.loss_type = {"simpo": "simpo", "cpo": "sigmoid"}[name]
    theirs = CPOTrainer.cpo_loss(fake, seen.policy_chosen, seen.policy_rejected)[0].mean()
    more = {"simpo_gamma": 0.6} if name == "simpo" else {"cpo_alpha": 0.0}
    ours, _ = pair_loss(x, PreferenceSettings(name, beta=0.4, label_smoothing=0.1, **more))
    assert_equal(ours, theirs, policy)


def test_orpo_odds_ratio_term():
    policy, _, _, mask = grids()
    rows = PairRows.of([*"abcde", *"abcde"], ["chosen"] * B + ["rejected"] * B)
    x = pair_logps(policy, None, mask, rows)
    seen = x.averaged()
    fake = SimpleNamespace(accelerator=ACCELERATOR, beta=0.4)
    theirs = -ORPOTrainer.odds_ratio_loss(fake, seen.policy_chosen, seen.policy_rejected)[0].mean()
    ours, _ = pair_loss(x, PreferenceSettings("orpo", beta=0.4))
    assert_equal(ours - (-seen.policy_chosen).mean(), theirs, policy)


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_unpaired_losses(loss_type):
    policy, ref, squares, mask = grids()
    label = torch.tensor([True, False, False, True, True, False, True, False, False, False])
    kl = torch.linspace(-1, 2, 2 * B)
    completion = torch.cat([torch.zeros(2 * B, P, dtype=torch.long), mask.long()], 1)
    batch = {"input_ids": torch.ones_like(completion), "attention_mask": torch.ones_like(completion), "label": label}
    batch["completion_mask"] = completion
    model, ref_model = Model(policy * mask, squares), Model(ref, squares)
    fake = SimpleNamespace(
        model=model,
        ref_model=ref_model,
        accelerator=ACCELERATOR,
        loss_type=loss_type,
        calculate_KL=loss_type == "kto",
        beta=0.3,
        desirable_weight=1.5,
        undesirable_weight=0.5,
        aux_loss_enabled=False,
        precompute_ref_logps=False,
        args=SimpleNamespace(gradient_checkpointing=False, gradient_checkpointing_kwargs=None),
        _compute_kl_logps=lambda which, _: kl if which is model else torch.zeros_like(kl),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
    )
    theirs = KTOTrainer._compute_loss(fake, model, batch, False)
    s = PreferenceSettings(loss_type, beta=0.3, desirable_weight=1.5, undesirable_weight=0.5)
    x = UnpairedLogps((policy * mask).sum(1), ref.sum(1), label, kl, torch.zeros_like(kl))
    ours, metrics = unpaired_loss(x, s, prepare(x, s)[0])
    assert_equal(ours, theirs, policy)
    their_metrics = {key: value[-1] for key, value in fake._metrics["train"].items()}
    for name in ("rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected"):
        assert metrics[name] == pytest.approx(their_metrics[name], rel=1e-5)
