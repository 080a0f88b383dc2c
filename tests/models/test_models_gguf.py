"""The reader of GGUF files, against the package ``gguf``; and the quick start's model made of one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl.errors import ModelError
from verl.models.gguf_file import GGUFFile
from verl.trainer.smollm2 import _convert

gguf = pytest.importorskip("gguf")
TEXTS = ["<|end|>", "<|start|>", "<|stop|>", "a", "b", "Ġ", "ab", "Ġa"]
HEADS, KEYS, SIZE, WIDE = 4, 2, 64, 96


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A small Llama as a GGUF file, in the formats that SmolLM2's has."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in (("block_count", 2), ("context_length", 128), ("embedding_length", SIZE), ("vocab_size", 8)):
        writer.add_uint32(f"llama.{name}", value)
    writer.add_uint32("llama.feed_forward_length", WIDE)
    writer.add_uint32("llama.attention.head_count", HEADS)
    writer.add_uint32("llama.attention.head_count_kv", KEYS)
    writer.add_float32("llama.rope.freq_base", 5000.0)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    writer.add_token_list(TEXTS)
    writer.add_token_types([3, 3, 3, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b", "Ġ a"])
    for name, number in (("bos", 1), ("eos", 2), ("unknown", 0), ("padding", 2)):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", number)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}é")
    numbers = np.random.default_rng(0)
    kinds = gguf.GGMLQuantizationType

    def add(name, *shape, kind=kinds.Q4_1):
        values = numbers.normal(size=shape).astype(np.float32)
        data = values if kind == kinds.F32 else gguf.quantize(values, kind)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)

    add("token_embd", 8, SIZE, kind=kinds.Q8_0)
    add("output_norm", SIZE, kind=kinds.F32)
    for i in range(2):
        add(f"blk.{i}.attn_norm", SIZE, kind=kinds.F32)
        add(f"blk.{i}.ffn_norm", SIZE, kind=kinds.F32)
        add(f"blk.{i}.attn_q", SIZE, SIZE)
        add(f"blk.{i}.attn_k", SIZE // HEADS * KEYS, SIZE, kind=kinds.F16)
        add(f"blk.{i}.attn_v", SIZE // HEADS * KEYS, SIZE)
        add(f"blk.{i}.attn_output", SIZE, SIZE)
        add(f"blk.{i}.ffn_gate", WIDE, SIZE)
        add(f"blk.{i}.ffn_up", WIDE, SIZE)
        add(f"blk.{i}.ffn_down", SIZE, WIDE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_it_reads_what_the_package_reads(file):
    ours, theirs = GGUFFile(file), gguf.GGUFReader(file)
    assert ours.names == [tensor.name for tensor in theirs.tensors] and len(ours.names) == 20
    for tensor in theirs.tensors:
        np.testing.assert_array_equal(ours.tensor(tensor.name), gguf.dequantize(tensor.data, tensor.tensor_type))
    assert ours.values["tokenizer.ggml.tokens"] == TEXTS and ours.values["llama.block_count"] == 2
    assert ours.values["tokenizer.ggml.add_bos_token"] is False and ours.values["tokenizer.chat_template"][-1] == "é"


def test_the_folder_is_the_model(file, tmp_path):
    """Its log-probs are those of GGUF's own arrangement: rotary pairs side by side."""
    _convert(file, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    raw = GGUFFile(file)
    ids = torch.tensor([[3, 4, 6, 7, 5]])
    with torch.no_grad():
        expected, got = plain_llama(raw, ids[0]), model(input_ids=ids).logits[0]
    assert torch.allclose(got, expected, atol=2e-2 * float(expected.abs().max()))  # the folder is in bfloat16
    assert model.generation_config.eos_token_id == 2
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer("ab a<|stop|>b")["input_ids"] == [6, 7, 2, 4]
    assert tokenizer.decode([6, 7, 2], skip_special_tokens=True) == "ab a"
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == ("<|stop|>", "<|stop|>", "<|start|>")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "aé"
    assert [path.name for path in tmp_path.iterdir()] == ["model"], "no draft is left"


def plain_llama(file: GGUFFile, ids: torch.Tensor) -> torch.Tensor:
    """(T, V) logits, written out after GGUF's convention."""
    weight = {name.removesuffix(".weight"): torch.from_numpy(np.array(file.tensor(name))) for name in file.names}
    count, head = len(ids), SIZE // HEADS
    angle = torch.arange(count)[:, None] * 5000.0 ** (-torch.arange(0, head, 2) / head)

    def norm(x, name):
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight[name]

    def turned(x):  # (T, heads, head)
        a, b = x[..., ::2], x[..., 1::2]
        sin, cos = angle.sin()[:, None], angle.cos()[:, None]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)

    x = weight["token_embd"][ids]
    for i in range(2):
        w = {name.removeprefix(f"blk.{i}."): value for name, value in weight.items() if name.startswith(f"blk.{i}.")}
        h = norm(x, f"blk.{i}.attn_norm")
        q, k, v = (h @ w[f"attn_{name}"].T for name in "qkv")
        q, k = turned(q.view(count, HEADS, head)), turned(k.view(count, KEYS, head))
        k, v = (y.view(count, KEYS, head).repeat_interleave(HEADS // KEYS, 1) for y in (k, v))
        scores = torch.einsum("thd,shd->hts", q, k) * head**-0.5
        scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf).softmax(-1)
        x = x + torch.einsum("hts,shd->thd", scores, v).reshape(count, SIZE) @ w["attn_output"].T
        h = norm(x, f"blk.{i}.ffn_norm")
        x = x + (torch.nn.functional.silu(h @ w["ffn_gate"].T) * (h @ w["ffn_up"].T)) @ w["ffn_down"].T
    return norm(x, "output_norm") @ weight["token_embd"].T


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (3, "is no GGUF file"),
        (20, "is no whole GGUF file"),
        (500, "is no whole GGUF file"),
        (-100, "ends within the ten"),
    ],
)
def test_a_file_that_is_cut_off(file, tmp_path, size, said):
    path = tmp_path / "cut.gguf"
    path.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ModelError, match=said):
        _convert(path, tmp_path / "model")
    assert not (tmp_path / "model").exists() and len(list(tmp_path.iterdir())) == 1
