"""What the quick start says, in English and in Chinese."""

from __future__ import annotations

TEXTS = {
    "en": {
        "description": "Watch a small language model learn arithmetic by reinforcement learning. Needs no data.",
        "epilog": "Any configuration override works too, for example actor_rollout_ref.actor.optim.lr=1e-5",
        "model": "folder or hub name (default: SmolLM2-135M-Instruct)",
        "steps": "training steps (default: {steps})",
        "algorithm": "default: grpo",
        "seed": "of sampling and data order (default: 42)",
        "output": "run folder (default: a new one under runs/)",
        "lang": "language of these texts: en or zh (default: the locale's)",
        "overrides": "configuration overrides",
        "loading": "Loading    {model} (half a minute on a small CPU)",
        "intro_model": "Model      {model}, {millions:.0f}M parameters, {dtype}",
        "intro_device": "Device     {device}",
        "intro_task": (
            "Task       sums of two numbers up to {highest}: {train} problems to train on, {held_out} held out"
        ),
        "intro_run": "Run        {folder}",
        "accuracy": "Accuracy on the held-out problems: {before:.2f} before, {after:.2f} after ({seconds:.0f} s).",
        "checkpoint": "Checkpoint {path}",
        "report": "Report     {path}",
        "metrics": "Metrics    {metrics}, samples in {samples}",
    },
    "zh": {
        "description": "看一个小语言模型用强化学习学会加法。不需要数据。",
        "epilog": "任何配置项都可以覆盖，例如 actor_rollout_ref.actor.optim.lr=1e-5",
        "model": "模型文件夹或 hub 名称（默认：SmolLM2-135M-Instruct）",
        "steps": "训练步数（默认：{steps}）",
        "algorithm": "算法（默认：grpo）",
        "seed": "采样和数据顺序的随机种子（默认：42）",
        "output": "运行文件夹（默认：在 runs/ 下新建）",
        "lang": "提示语言：en 或 zh（默认：由系统语言决定）",
        "overrides": "配置覆盖项",
        "loading": "载入       {model}（较小的 CPU 约需半分钟）",
        "intro_model": "模型       {model}，{millions:.0f}M 参数，{dtype}",
        "intro_device": "设备       {device}",
        "intro_task": "任务       {highest} 以内两数之和：{train} 道题用于训练，{held_out} 道题留作检验",
        "intro_run": "运行目录   {folder}",
        "accuracy": "留出题的正确率：训练前 {before:.2f}，训练后 {after:.2f}（用时 {seconds:.0f} 秒）。",
        "checkpoint": "检查点     {path}",
        "report": "报告       {path}",
        "metrics": "指标       {metrics}，样本在 {samples}",
    },
}
