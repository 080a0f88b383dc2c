"""What `verl export` writes loads in the real vLLM, and answers as the policy does."""

from __future__ import annotations

import pytest
import torch
from tiny_models import make_tokenizer, save_tiny_model
from transformers import AutoModelForCausalLM
from vllm_runs import WIDE

from verl.cli.main import main
from verl.rollout.vllm.engine import QUIET

PROMPTS = ("12+30=", "a b c", "7")
TOKENS = 16


@pytest.mark.parametrize("tied", [False, True])
def test_an_exported_folder_answers_the_same_greedily(tied, tmp_path, monkeypatch):
    for name, value in {**QUIET, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}.items():
        monkeypatch.setenv(name, value)
    source = save_tiny_model(tmp_path / "policy", tie_word_embeddings=tied, **WIDE)
    command = ["export", "--model_path", str(source), "--export_format", "vllm", "--output_dir", str(tmp_path / "out")]
    assert main([*command, "--max_shard_size", "100KB", "--verify"]) == 0
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1

    from vllm import LLM, SamplingParams

    limits = {"max_model_len": 96, "max_num_seqs": 4, "gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 64 << 20}
    served = LLM(str(tmp_path / "out"), enforce_eager=True, dtype="float32", **limits)
    given = served.generate(list(PROMPTS), SamplingParams(temperature=0, max_tokens=TOKENS))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval(), make_tokenizer()
    for prompt, answer in zip(PROMPTS, given, strict=True):
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        with torch.no_grad():
            expected = model.generate(ids, do_sample=False, max_new_tokens=TOKENS, pad_token_id=0)[0, ids.shape[1] :]
        assert list(answer.outputs[0].token_ids) == expected.tolist()
