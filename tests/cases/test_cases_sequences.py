"""Public cases B38, B39, B40 (texts to learn from), B84, B85, B88 (pairs): what is trained, token by token."""

from __future__ import annotations

import numpy as np
import pytest
from data_helpers import CHATML, byte_tokenizer

from verl import notices
from verl.data import PreferenceDataset, SFTDataset, collate_pairs, collate_sequences
from verl.errors import DataError
from verl.models.packing import pack

PLAIN, CHAT = byte_tokenizer(chat_template=None), byte_tokenizer()
REFUSES_SINGLES = (
    "{% if messages | length == 1 and messages[0].role != 'user' %}{{ raise_exception('no lone message') }}{% endif %}"
    + CHATML
)


def turn(role, text):
    return {"role": role, "content": text}


def trained_text(item, tokenizer):
    ids = np.concatenate([item["prompt_ids"], item["response_ids"]])
    mask = np.concatenate([np.zeros(len(item["prompt_ids"]), bool), item["response_mask"].astype(bool)])
    edges = np.flatnonzero(np.diff([0, *mask.astype(int), 0])).reshape(-1, 2)
    return [tokenizer.decode(ids[a:b]) for a, b in edges], tokenizer.decode(ids)


def test_B38_a_template_that_forbids_single_messages():
    tokenizer = byte_tokenizer(chat_template=REFUSES_SINGLES)
    conversation = [
        turn("system", "s"),
        turn("user", "q1"),
        turn("assistant", "a1"),
        turn("user", "q2"),
        turn("assistant", "a2"),
    ]
    item = SFTDataset([{"messages": conversation}], tokenizer)[0]
    spans, whole = trained_text(item, tokenizer)
    assert spans == ["a1<|im_end|>", "a2<|im_end|>"]
    assert tokenizer.apply_chat_template(conversation, tokenize=False).startswith(whole)


def test_B39_the_response_and_its_eos_are_predicted_and_nothing_else():
    item = SFTDataset([{"prompt": "pqs", "response": "r"}], PLAIN)[0]
    eos = PLAIN.eos_token_id
    assert PLAIN.decode(item["prompt_ids"]) == "pqs" and item["response_ids"].tolist()[-1] == eos
    assert len(item["response_ids"]) == 2 and item["response_mask"].all()
    packed = pack(collate_sequences([item], ["u"], PLAIN.eos_token_id))  # pad equals eos
    assert packed.target.tolist() == item["response_ids"].tolist()
    fed = packed.input_ids[0, packed.source].tolist()
    assert fed == [int(item["prompt_ids"][-1]), int(item["response_ids"][0])]  # r from p3, EOS from r


def test_B40_a_merge_over_the_border_is_split_in_tokens_and_told_once():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"</s>": 0, " ": 1, "A": 2, " A": 3, "Q": 4}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[(" ", "A")]))
    core.pre_tokenizer = pre_tokenizers.Split(" ?A", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="</s>", eos_token="</s>")
    rows = [{"prompt": "Q ", "response": "A"}] * 3
    data = SFTDataset(rows, tokenizer)
    for k in range(3):
        assert data[k]["prompt_ids"].tolist() == [4, 1] and data[k]["response_ids"].tolist() == [2, 0]
    told = [line for line in notices.seen() if "merges characters across the border" in line]
    assert len(told) == 1 and "row 0" in told[0]


def pair(prompt, chosen, rejected, **config):
    return PreferenceDataset([{"prompt": prompt, "chosen": chosen, "rejected": rejected}], PLAIN, **config)


def test_B84_rows_are_cut_before_padding_and_both_sides_keep_one_prompt():
    """Prompt 6 tokens, answers of 2 and 8 (their eos counted): keep_end of 6 leaves two different prompts."""
    with pytest.raises(DataError, match="cuts the two prompts differently"):
        pair("pqrstu", "a", "bcdefgh", max_length=6, truncation="keep_end")
    with pytest.raises(DataError, match=r"no row can be used: 1 of 1 rows are left out \(1 different prompts"):
        pair("pqrstu", "a", "bcdefgh", max_length=6, truncation="keep_end", on_bad_row="drop")
    item = pair("pqrstu", "a", "b", max_length=6, truncation="keep_end")[0]
    assert PLAIN.decode(item["prompt_ids"]) == "rstu"  # the last 4 prompt tokens, and 2 of the answer
    assert PLAIN.decode(item["chosen_ids"]) == "a</s>" and PLAIN.decode(item["rejected_ids"]) == "b</s>"
    uneven = pair("pq", "a", "bcdefgh")[0]
    batch = collate_pairs([item, uneven], ["x", "y"], PLAIN.pad_token_id)
    assert (batch.batch["response_mask"].sum(1) > 0).all()  # padding takes nothing of a row
    assert batch.batch["attention_mask"].sum(1).tolist() == [6, 6, 4, 10]


@pytest.mark.parametrize("how", ["keep_start", "error"])
def test_B85_a_prompt_that_leaves_no_room_is_an_error_or_counted(how):
    words = "leaves nothing of 'chosen'" if how == "keep_start" else "length 12 > max_length 8"
    with pytest.raises(DataError, match=f"row 0.*{words}"):
        pair("p" * 10, "a", "b", max_length=8, truncation=how)
    rows = [{"prompt": "p" * n, "chosen": "a", "rejected": "b"} for n in (10, 3)]
    data = PreferenceDataset(rows, PLAIN, max_length=8, truncation=how, on_bad_row="drop")
    assert len(data) == 1 and data[0]["index"] == 1 and data.report.dropped.total() == 1
    assert any("1 of 2 rows are left out" in line and "row 0" in line for line in notices.seen())


def test_B88_the_prompt_is_the_common_beginning_templated_once():
    template = "{% if messages[0].role != 'system' %}<|im_start|>system\nhelp<|im_end|>\n{% endif %}" + CHATML
    tokenizer = byte_tokenizer(chat_template=template)
    start = [turn("user", "q1"), turn("assistant", "a1"), turn("user", "q2")]
    row = {"chosen": [*start, turn("assistant", "yes")], "rejected": [*start, turn("assistant", "no")]}
    item = PreferenceDataset([row], tokenizer)[0]
    prompt = tokenizer.decode(item["prompt_ids"])
    assert prompt == tokenizer.apply_chat_template(start, tokenize=False, add_generation_prompt=True)
    assert prompt.count("help") == 1 and prompt.count("<|im_start|>system") == 1
    assert tokenizer.decode(item["chosen_ids"]) == "yes<|im_end|>"
    assert tokenizer.decode(item["rejected_ids"]) == "no<|im_end|>"
    given = {"prompt": start, **row}
    again = PreferenceDataset([given], tokenizer)[0]
    assert np.array_equal(again["prompt_ids"], item["prompt_ids"])


def test_B87_five_steps_on_one_pair_lower_the_loss(tiny_model_dir):
    """The policy and a frozen copy of it: the reference does not move with the policy."""
    import torch

    from verl.algorithms.preference import PairRows, PreferenceSettings, pair_logps, pair_loss
    from verl.models.loading import load_tokenizer
    from verl.models.policy import load_policy, log_probs
    from verl.models.settings import ModelSettings

    tokenizer = load_tokenizer(str(tiny_model_dir))
    item = PreferenceDataset([{"prompt": "1+1=", "chosen": "2", "rejected": "7"}], tokenizer)[0]
    batch = collate_pairs([item], ["p"], tokenizer.pad_token_id)
    settings = ModelSettings(str(tiny_model_dir))
    policy, reference = load_policy(settings), load_policy(settings, frozen=True)
    rows = PairRows.of(batch.non_tensor_batch["pair_id"], batch.non_tensor_batch["side"])
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    with torch.no_grad():
        ref = log_probs(reference, batch)[0]
    losses = []
    for _ in range(6):
        x = pair_logps(log_probs(policy, batch)[0], ref, batch.batch["response_mask"], rows)
        loss, _ = pair_loss(x, PreferenceSettings())
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[0] == pytest.approx(0.6931, abs=1e-4) and losses == sorted(losses, reverse=True) and losses[5] < 0.69
    with torch.no_grad():
        assert torch.equal(ref, log_probs(reference, batch)[0])
