"""The list of commands and the first words in Chinese."""

from __future__ import annotations

SUMMARIES = {
    "quickstart": "看一个真实的小模型在几分钟内学会加法",
    "train": "训练：grpo、ppo、dpo、kto、sft、rm……（默认 ppo）",
    "plan": "只显示最终配置和内存预算，不运行",
    "profile": "训练几步，并记录其中的耗时",
    "report": "生成一次训练的报告，或把几次训练放在一页上比较",
    "dash": "在浏览器里实时查看训练",
    "export": "把训练结果导出成可以部署的文件夹",
    "generate": "让模型回答提示词",
    "chat": "在终端里与模型对话",
    "compare": "并排比较两个模型的回答",
    "serve": "以 OpenAI 兼容接口提供模型服务",
    "convert-config": "把 TRL 或 verl 的配置改写成本项目的配置",
    "completion": "输出 bash、zsh 或 fish 的命令补全脚本",
    "doctor": "检查本机：能做什么、选了什么、缺什么",
}
START = """从这里开始：
  verl quickstart --lang zh       真实的小模型在几分钟内学会加法
  verl doctor                     看看本机会用什么，为什么
  verl train data.train_files=train.parquet actor_rollout_ref.model.path=MODEL"""
NEXT = "最近一次训练：{run}\n接下来可以："
NEXT_LINES = {
    "report": "训练报告（网页）",
    "chat": "与训练好的模型对话",
    "compare": "与原模型并排比较",
    "export": "导出以便部署",
}
ALL = "`verl --help` 列出全部命令。"
TRACEBACK = "HYDRA_FULL_ERROR=1 会同时显示用户错误的完整调用栈。"
USAGE = "用法：verl 命令 ..."
