"""Rollouts through SGLang against SGLang by itself, and what handing new weights over takes, on one GPU.

    python benchmarks/sglang_rollout.py --shape 0.5b --parts alone,engine,sync
    PYTHONPATH=SITE python benchmarks/sglang_rollout.py --parts sync --eager --rounds 5 --limit 120     # a quick look

The parts, the work and the lines that are printed are those of ``vllm_rollout.py``. ``alone`` is
``sglang.Engine.generate`` on all prompts at once, with the arguments that verl gives. SITE is a folder with SGLang's
packages, where they are not installed.
"""

from __future__ import annotations

import argparse
import time

import vllm_rollout as common


def alone(args: argparse.Namespace) -> None:
    from sglang.srt.entrypoints.engine import Engine
    from transformers import AutoConfig

    from verl.rollout import SamplingParams
    from verl.rollout.sglang.adapter import engine_arguments, sampling

    folder = common.model_folder(args, weights=False)
    common.begin(args, "SGLang starts")
    started = time.perf_counter()
    engine = Engine(**engine_arguments(folder, common.settings_of(args, sleep=False), args.device))
    common.tell(part="alone", setup_s=time.perf_counter() - started)
    prompts = common.prompts_of(args, AutoConfig.from_pretrained(folder).vocab_size) * args.n
    seconds, tokens = [], 0
    for run in range(args.runs + 1):
        engine.flush_cache()
        params = [sampling(SamplingParams(args.new), run * 10_000 + i, ()) for i in range(len(prompts))]
        common.begin(args, f"run {run}")
        started = time.perf_counter()
        done = engine.generate(input_ids=prompts, sampling_params=params, return_logprob=True)
        seconds.append(time.perf_counter() - started)
        tokens = sum(len(answer["output_ids"]) for answer in done)
    common.told(args, "alone", seconds[1:], tokens)
    engine.shutdown()


if __name__ == "__main__":
    common.main("sglang", {**common.PARTS, "alone": alone}, __file__, __doc__)
