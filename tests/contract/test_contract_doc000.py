"""Table A: the document about one old GPU, PPO on GSM8K."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from contract_blocks import ARROW_TO_PARQUET, MAIN_PPO
from contract_hub import write_model

import verl
from verl.config import load_config, validate
from verl.errors import ConfigError

CLONE = Path(verl.__file__).parent.parent
QUESTIONS = [
    ("Tom has 2 apples and buys 3 more. How many apples does Tom have in all?", "2+3=<<2+3=5>>5\n#### 5"),
    ("Ann had 9 eggs and ate 4. How many are left?", "9-4=<<9-4=5>>5\n#### 5"),
    ("A box holds 6 pens. How many pens do 2 boxes hold?", "6*2=<<6*2=12>>12\n#### 12"),
]


@pytest.fixture
def parent(tmp_path) -> Path:
    """The folder in which the document's reader works: the clone lies in it as ``verl``."""
    if not (CLONE / "examples").is_dir():
        pytest.skip("not run from a clone")
    (tmp_path / "verl").symlink_to(CLONE, target_is_directory=True)
    return tmp_path


def write_raw(folder: Path) -> None:
    """``gsm8k_disk`` as ``datasets`` keeps GSM8K, and the document's own block that makes parquet files of it."""
    from datasets import Dataset, DatasetDict

    rows = Dataset.from_list([{"question": question, "answer": answer} for question, answer in QUESTIONS])
    DatasetDict({"train": rows, "test": rows}).save_to_disk(str(folder / "gsm8k_disk"))
    block = f"import os; os.chdir({str(folder)!r})\n{ARROW_TO_PARQUET}"
    subprocess.run([sys.executable, "-c", block], check=True, timeout=300)


def test_A2_and_A3_the_documents_own_commands(parent, environment):
    import pyarrow.parquet as pq

    write_raw(parent)
    home = parent / "home"
    write_model(home / "models/Qwen/Qwen2.5-0.5B-Instruct", "qwen2", "causal", True)
    # `python` and `python3` are those of the environment that verl is installed in
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**environment, "HOME": str(home), "PATH": path}
    command = (
        "python verl/examples/data_preprocess/gsm8k.py --data_source ./train.parquet --local_dir ./data/gsm8k/fmt_rl"
    )
    made = subprocess.run(command, shell=True, cwd=parent, env=env, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    table = pq.read_table(parent / "data/gsm8k/fmt_rl/test.parquet")
    assert {"data_source", "prompt", "ability", "reward_model", "extra_info"} <= set(table.column_names)
    assert [row["ground_truth"] for row in table["reward_model"].to_pylist()] == ["5", "5", "12"]

    shutil.copytree(parent / "data", home / "data")
    script = MAIN_PPO.replace("@MORE@", "trainer.total_training_steps=22")
    ran = subprocess.run(["bash", "-c", script], cwd=parent, env=env, capture_output=True, text=True, timeout=600)
    log = (parent / "verl_demo.log").read_text()
    assert ran.stdout == log
    assert "step:22 - " in log and "actor/pg_loss:" in log and "critic/vf_loss:" in log, log
    # A3: one notice each; vLLM cannot run here, so the rollout falls back
    assert "actor_rollout_ref.fsdp_config.cpu_offload" in log and "actor_rollout_ref.fsdp_config.offload_params" in log
    assert "rollout.name=vllm cannot be used here" in log
    # A8: the coefficient that was given turns the KL in the reward on
    assert "algorithm.kl_ctrl.kl_coef=0.001 turns the KL in the reward on" in log
    assert "actor/reward_kl_penalty:" in log
    run = parent / "checkpoints/verl_examples/gsm8k"
    for step in (10, 20, 22):
        assert (run / f"actor/global_step_{step}/config.json").is_file()
    # A5: the document's run broke at step 8 or 9; after the first saves and tests nothing grows any more
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    memory = [record["perf/process_memory_gb"] for record in records if "perf/process_memory_gb" in record]
    assert len(memory) == 22 and max(memory[16:]) < max(memory[10:16]) + 0.1, memory


def test_A8_an_explicit_no_wins():
    keys = ["actor_rollout_ref.model.path=m", "algorithm.kl_ctrl.kl_coef=0.001"]
    assert load_config(keys).algorithm.use_kl_in_reward
    assert not load_config([*keys, "algorithm.use_kl_in_reward=false"]).algorithm.use_kl_in_reward


def test_A10_the_near_match_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "models/Qwen2.5-0.5B-Instruct", "qwen2", "causal", True)
    config = load_config([f"actor_rollout_ref.model.path={tmp_path}/home/models/Qwen/Qwen2.5-0.5B-Instruct"])
    with pytest.raises(ConfigError, match=r"did you mean models/Qwen2\.5-0.5B-Instruct"):
        validate(config, need_data=False)


def test_A4_the_documents_sed_lines_find_nothing_to_change():
    """Section 4.2 replaces two words in every file. They stand in none, so doing it does no harm."""
    words = [f'"{word}"'.encode() for word in ("Bfloat" + "16", "flash_attention" + "_2")]
    folders = [CLONE / name for name in ("verl", "tests", "examples", "scripts", "docs", "benchmarks", "docker")]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    files += [path for path in CLONE.iterdir() if path.is_file()]
    assert len(files) > 300
    assert not [path for path in files if any(word in path.read_bytes() for word in words)]
