"""Public cases B62 to B75: resuming, checkpoints, exported models."""

from __future__ import annotations

import errno
import json

import pytest
import torch
from cases_actor import live, make_actor, plan_of, recorded
from tiny_models import save_tiny_model
from trainer_helpers import make_trainer
from transformers import AutoModelForCausalLM

from verl import notices
from verl.checkpoint import CheckpointStore
from verl.data import PromptLoader
from verl.errors import CheckpointError
from verl.hybrid import make_twin


class Numbers:
    """A dataset whose rows are their numbers."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, position):
        return {"index": position}


def drawn(loader):
    return [list(batch.non_tensor_batch["index"]) for batch in loader]


def test_B62_resuming_at_the_end_of_an_epoch_does_the_next_epoch(tiny_model_dir, tmp_path):
    straight = PromptLoader(Numbers(120), 2, epochs=2)
    batches = drawn(straight)
    assert len(batches) == 120
    first = PromptLoader(Numbers(120), 2, epochs=2)
    for _ in range(60):
        first.next_batch()
    resumed = PromptLoader(Numbers(120), 2, epochs=2)
    resumed.load_state_dict(first.state_dict())
    assert drawn(resumed) == batches[60:]
    epochs = {"trainer__total_training_steps": None, "trainer__total_epochs": 2, "data__train_batch_size": 8}
    half = make_trainer(tiny_model_dir, tmp_path, **{**epochs, "trainer__total_epochs": 1, "trainer__save_final": True})
    half.fit()
    whole = make_trainer(tiny_model_dir, tmp_path, **epochs)
    steps = whole.loader.steps_per_epoch
    assert whole.global_steps == half.global_steps == steps == 2
    whole.fit()
    assert whole.global_steps == 2 * steps


def test_B63_the_position_inside_the_second_epoch():
    loader = PromptLoader(Numbers(1000), 128, last_batch="drop")
    for _ in range(8):  # the rows that OpenRLHF's batches span: 1024 of 1000
        loader.draw(128)
    state = loader.state_dict()
    assert (state["epoch"], state["position"]) == (1, 24)
    resumed = PromptLoader(Numbers(1000), 8)
    resumed.load_state_dict(state)
    assert list(resumed.next_batch().non_tensor_batch["index"]) == list(loader.draw(8).non_tensor_batch["index"])


def write_one(folder):
    (folder / "model.bin").write_bytes(b"weights")


def test_B66_a_crash_while_saving_leaves_the_only_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=1)
    store.save(1, write_one)

    def crash(folder):
        write_one(folder)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CheckpointError, match="Older checkpoints are untouched"):
        store.save(2, crash)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1"
    assert (CheckpointStore(tmp_path).find() / "model.bin").read_bytes() == b"weights"
    assert not (tmp_path / "global_step_2").exists()


@pytest.mark.parametrize("tracker", ["5", "", "five", None])
def test_B68_a_tracker_that_names_nothing_falls_back_aloud(tmp_path, tracker):
    store = CheckpointStore(tmp_path)
    store.save(4, write_one)
    file = tmp_path / "latest_checkpointed_iteration.txt"
    file.unlink() if tracker is None else file.write_text(tracker)
    assert store.find() == tmp_path / "global_step_4"
    assert any("global_step_4" in line for line in notices.seen())
    with pytest.raises(CheckpointError, match=r"global_step_5.*global_step_4"):
        store.find("resume_path", tmp_path / "global_step_5")


def test_B70_a_finished_run_is_not_trained_further(tiny_model_dir, tmp_path):
    make_trainer(tiny_model_dir, tmp_path, trainer__save_final=True).fit()
    again = make_trainer(tiny_model_dir, tmp_path, trainer__save_final=True)
    before = live(again.roles.actor)
    again.fit()
    assert again.global_steps == 2 and (tmp_path / "global_step_2" / "actor" / "model.safetensors").is_file()
    assert all(torch.equal(before[name], now) for name, now in live(again.roles.actor).items())
    assert any("Nothing to do: step 2 of 2" in line for line in notices.seen())


def test_B73_tied_weights_are_exported_once_and_load_tied_and_untied(tmp_path):
    from safetensors import safe_open

    model = save_tiny_model(tmp_path / "tied", tie_word_embeddings=True)
    actor = make_actor(model)
    batch = recorded()
    actor.update(batch, plan_of(batch))
    folder = tmp_path / "export"
    folder.mkdir()
    actor.save_pretrained(str(folder))
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        names = list(file.keys())
    assert sum("embed_tokens" in name or "lm_head" in name for name in names) == 1
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        right = make_twin(actor.workers[0].model)(ids).logits
        loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
        torch.testing.assert_close(loaded(ids).logits, right, atol=1e-5, rtol=0)
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    untied = save_tiny_model(tmp_path / "untied", tie_word_embeddings=False)
    actor = make_actor(untied)
    (tmp_path / "export2").mkdir()
    actor.save_pretrained(str(tmp_path / "export2"))
    with torch.no_grad():
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export2").eval()
        torch.testing.assert_close(loaded(ids).logits, make_twin(actor.workers[0].model)(ids).logits, atol=1e-5, rtol=0)


def test_B75_a_nan_gradient_skips_the_step_and_is_told(tiny_model_dir):
    actor = make_actor(tiny_model_dir)
    before = live(actor)
    batch = recorded()
    batch.batch["advantages"][0, 0] = float("nan")
    metrics = actor.update(batch, plan_of(batch))
    assert metrics["actor/skipped_steps"] == 1 and not torch.isfinite(torch.tensor(metrics["actor/grad_norm"]))
    assert all(torch.equal(before[name], now) for name, now in live(actor).items())
    actor.update(recorded(), plan_of(recorded()))
    assert any(not torch.equal(before[name], now) for name, now in live(actor).items())


def sampled(folder):
    """(step, prompt, response) of the rows on record."""
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    return [(row["step"], row["prompt"], row["response"]) for row in rows]


def whole_state(trainer):
    """(role, name) → a copy of a tensor: weights, optimizer, and counters but that of writes, as loading is one."""
    roles = {"actor": trainer.roles.actor, "critic": trainer.roles.critic}
    found = {(role, name): value.clone() for role, group in roles.items() for name, value in group.state_dict().items()}
    return {key: value[1:] if key[1] == "counters" else value for key, value in found.items()}


@pytest.mark.parametrize("ranks", [(1, 2, 1), (2, 1, 2)], ids=["1 to 2 to 1", "2 to 1 to 2"])
def test_B65_another_number_of_ranks_goes_on_with_the_same_samples_and_optimizer(tiny_model_dir, tmp_path, ranks):
    """Ranks as threads; as processes with shards they are in tests/checkpoint/test_checkpoint_sharded_run.py."""
    from learning_helpers import two_ranks

    def run(folder, world, until):
        with pytest.MonkeyPatch.context() as patch:
            if world == 2:
                two_ranks(patch)
            trainer = make_trainer(
                tiny_model_dir, folder, algorithm="ppo", trainer__total_training_steps=3, trainer__save_freq=1
            )
            assert trainer.roles.actor.world_size == world
            states = [whole_state(trainer)]
            trainer.callbacks = (lambda trainer, metrics: states.append(whole_state(trainer)),)
            trainer.total_steps = until
            trainer.fit()
        return states[0], states[-1]

    _, right = run(tmp_path / "alone", 1, 3)
    kept = None
    for world, until in zip(ranks, (1, 2, 3), strict=True):
        before, after = run(tmp_path / "mixed", world, until)
        if kept is not None:
            assert before.keys() == kept.keys() and any("optim" in name for _, name in before)
            assert [name for name in before if not torch.equal(before[name], kept[name])] == []
        kept = after
    assert sampled(tmp_path / "mixed") == sampled(tmp_path / "alone")
    for name, value in right.items():
        torch.testing.assert_close(after[name], value, rtol=0, atol=2e-4)


def test_random_words_that_are_no_numbers_of_a_generator_are_a_message(tiny_model_dir, tmp_path):
    """Found by the long fuzz run: Python's generator raises OverflowError at a negative word."""
    from test_fuzz_checkpoints import list_again

    from verl.checkpoint import read_state, write_state

    trainer = make_trainer(tiny_model_dir, tmp_path, trainer__total_training_steps=1, trainer__save_final=True)
    trainer.fit()
    state = tmp_path / "global_step_1" / "train_state"
    tensors, extra = read_state(state)
    extra["rng"]["python"]["words"][0] = -1
    write_state(state, dict(tensors), extra)
    list_again(tmp_path)
    with pytest.raises(CheckpointError, match=r"cannot be resumed from.*OverflowError.*resume_mode=disable"):
        make_trainer(tiny_model_dir, tmp_path)
    assert (tmp_path / "global_step_1" / "actor" / "model.safetensors").is_file()
