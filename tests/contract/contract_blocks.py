"""The documents' code, as a reader saves it. What a block leaves open (``...``, an undefined name) is filled in where
it is used, never here."""

# document 001, section 2.3
QUICKSTART = """
# quickstart.py
from verl import RLTrainer
from transformers import AutoTokenizer

# 1. 加载模型与分词器（自动适配HuggingFace生态）
model_name = "facebook/opt-125m"
tokenizer = AutoTokenizer.from_pretrained(model_name)
tokenizer.pad_token = tokenizer.eos_token

# 2. 构建极简reward函数：对"good"开头的输出给+1分，其余0分
def reward_fn(batch):
    outputs = tokenizer.batch_decode(batch["generated_tokens"], skip_special_tokens=True)
    return [1.0 if out.strip().lower().startswith("good") else 0.0 for out in outputs]

# 3. 初始化训练器（自动识别单卡/多卡，启用3D-HybridEngine）
trainer = RLTrainer(
    model_name=model_name,
    reward_fn=reward_fn,
    num_rollout_samples=4,  # 每轮采样4条样本
    batch_size_per_device=2,  # 每卡batch size=2
    max_seq_len=128  # 控制显存占用
)

# 4. 执行1个训练step（约15秒，含rollout + PPO update）
trainer.train_step()
print(" 首个PPO step完成！查看日志中的'kl_divergence'和'reward_mean'指标")
"""

# document 001, section 3.1
HYBRID_DATAFLOW = """
from verl.dataflow import HybridDataflow

flow = HybridDataflow(
    actor_model="Qwen/Qwen2-0.5B",  # 生成响应
    reward_model="OpenBMB/reward-model",  # 打分模型
    critic_model="Qwen/Qwen2-0.5B-critic",  # 价值评估
    rollout_batch_size=32,
    num_rollout_workers=4  # 自动启4进程并行采样
)
"""

# document 001, section 3.3
WRAP_FOR_RL = """
from transformers import LlamaForCausalLM
from verl import wrap_for_rl

# 原始HuggingFace模型，完全未修改
model = LlamaForCausalLM.from_pretrained("meta-llama/Llama-3-8b")

# 一行包装，获得RL就绪能力
rl_model = wrap_for_rl(
    model,
    enable_kl_penalty=True,  # 启用KL散度约束
    use_flash_attention=True,  # 自动启用FlashAttention-2
    offload_reward_to_cpu=False  # Reward模型保留在GPU
)

# 现在rl_model支持.verl_rollout()、.verl_update()等方法
outputs = rl_model.verl_rollout(input_ids, max_new_tokens=64)
"""

# document 001, section 4.2
SCALED_BY_WORLD_SIZE = """
trainer = RLTrainer(
    model_name="Qwen/Qwen2-1.5B",
    rollout_batch_size=16,
    # 关键：按GPU数量缩放
    max_seq_len=512 // trainer.world_size,  # 2卡时设为256
    kv_cache_max_len=1024 // trainer.world_size
)
"""

# document 001, section 5.1
ECOMMERCE = """
def ecommerce_reward_fn(batch):
    # batch包含用户query、模型生成的商品描述
    queries = tokenizer.batch_decode(batch["input_ids"])
    descriptions = tokenizer.batch_decode(batch["generated_tokens"])
    rewards = []
    for q, d in zip(queries, descriptions):
        # 调用你内部的CTR预估服务（返回0~1概率）
        ctr = call_internal_ctr_api(q, d)
        # 加入转化率惩罚（避免过度营销）
        conversion_penalty = 0.2 if "limited time" in d.lower() else 0
        rewards.append(max(0, ctr - conversion_penalty))
    return rewards
"""

# document 004, section 2.2
ALPACA = """
import pandas as pd

data = {
    "instruction": [
        "写一首关于春天的五言绝句",
        "解释量子纠缠是什么，用中学生能听懂的话",
        "把下面这段话改写成正式商务邮件：'嘿，那个报告我明天发你'"
    ],
    "input": ["", "", ""],
    "output": [
        "春山新绿映晴空，桃李争芳醉晚风。\\n莺啼柳岸声悠远，燕剪云霞影自东。",
        "想象你和朋友牵着一根很长的橡皮筋。无论你们相隔多远，只要一拉一放，另一端立刻有反应——量子纠缠就像这根看不见的‘幽灵橡皮筋’，粒子间存在这种瞬时关联。",
        "尊敬的[收件人姓名]：\\n\\n您好！\\n\\n关于您提及的报告，我预计将于明日（[具体日期]）前完成并发送至您的邮箱。如有其他需求，请随时告知。\\n\\n此致\\n敬礼\\n[您的姓名]"
    ]
}

df = pd.DataFrame(data)
df.to_parquet("data/train.parquet", index=False)
"""

# document 004, section 2.3
TRAIN_MINIMAL = """
from verl import RayPPOTrainer
from verl.data.rlhf_dataset import RLHFDataset
from transformers import AutoTokenizer
import torch

# 1. 加载分词器（用Qwen-1.5B作示例，你可换任意HF模型）
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen1.5-0.5B", trust_remote_code=True)
tokenizer.pad_token = tokenizer.eos_token

# 2. 构建数据集（自动应用chat template）
dataset = RLHFDataset(
    data_files="data/train.parquet",
    tokenizer=tokenizer,
    config={"max_prompt_length": 128, "max_response_length": 128}
)

# 3. 初始化训练器（单卡模式，无需Ray集群）
trainer = RayPPOTrainer(
    config={
        "trainer": {"n_gpus_per_node": 1, "nnodes": 1, "total_epochs": 1},
        "actor_rollout": {"model_name": "Qwen/Qwen1.5-0.5B"},
        "data": {"train_files": ["data/train.parquet"]}
    }
)

# 4. 开始训练（仅1个batch，秒级完成）
trainer.fit()
"""

# document 004, section 3.2 (without the last line, whose config is "...")
MY_REWARD = '''
def my_reward_fn(batch):
    """
    batch: DataProto对象，含input_ids, response_ids等
    返回: shape=(batch_size,) 的reward tensor
    """
    import torch
    rewards = []
    for i in range(len(batch.batch['response_ids'])):
        # 获取生成的文本
        response_text = tokenizer.decode(batch.batch['response_ids'][i], skip_special_tokens=True)
        # 规则1：长度在50-200字之间得1分，否则0分
        length_score = 1.0 if 50 <= len(response_text) <= 200 else 0.0
        # 规则2：含“谢谢”“您好”等礼貌词得0.5分
        polite_score = 0.5 if any(word in response_text for word in ["谢谢", "您好", "麻烦"]) else 0.0
        rewards.append(length_score + polite_score)
    return torch.tensor(rewards, dtype=torch.float32)
'''

# document 004, section 3.3
CONFIG = """
config = {
    "trainer": {
        "n_gpus_per_node": 1,
        "nnodes": 1,
        "micro_batch_size": 4,
        "save_freq": 10,
        "total_epochs": 2
    },
    "algorithm": {
        "kl_penalty": 0.01,
        "gamma": 0.99,  # 折扣因子，保持默认即可
        "lam": 0.95  # GAE lambda，保持默认即可
    }
}
"""

# document 004, section 4.2
COMPARE = """
from transformers import AutoModelForCausalLM, AutoTokenizer

# 加载原始模型
base_model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen1.5-0.5B").to("cuda")
base_tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen1.5-0.5B")

# 加载微调后模型（verl默认存为huggingface格式）
ft_model = AutoModelForCausalLM.from_pretrained("./actor/global_step_50").to("cuda")
ft_tokenizer = AutoTokenizer.from_pretrained("./actor/global_step_50")

prompts = ["如何安慰失恋的朋友？", "用Python写一个快速排序"]

for p in prompts:
    print(f"Prompt: {p}")
    # 原始模型
    inputs = base_tokenizer(p, return_tensors="pt").to("cuda")
    out_base = base_model.generate(**inputs, max_new_tokens=128)
    print(f"Base: {base_tokenizer.decode(out_base[0], skip_special_tokens=True)}")

    # 微调后模型
    inputs = ft_tokenizer(p, return_tensors="pt").to("cuda")
    out_ft = ft_model.generate(**inputs, max_new_tokens=128)
    print(f"FT: {ft_tokenizer.decode(out_ft[0], skip_special_tokens=True)}\\n")
"""

# document 000, section 4.1
ARROW_TO_PARQUET = """
from datasets import load_from_disk

# 加载原始数据
ds = load_from_disk("gsm8k_disk")
ds["train"].to_parquet("train.parquet")
ds["test"].to_parquet("test.parquet")
"""

# document 000, section 4.3; the data and the model lie under $HOME
MAIN_PPO = r"""
export HYDRA_FULL_ERROR=1
export VLLM_DTYPE=float32
export PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128
PYTHONUNBUFFERED=1 TRITON_MAX_SHARED_MEMORY=49152 \
python3 -m verl.trainer.main_ppo \
  data.train_files=$HOME/data/gsm8k/fmt_rl/train.parquet \
  data.val_files=$HOME/data/gsm8k/fmt_rl/test.parquet \
  data.train_batch_size=1 \
  data.max_prompt_length=256 \
  data.max_response_length=256 \
  actor_rollout_ref.model.path=$HOME/models/Qwen/Qwen2.5-0.5B-Instruct \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=1 \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.3 \
  actor_rollout_ref.rollout.max_num_batched_tokens=512 \
  ++actor_rollout_ref.rollout.enable_chunked_prefill=false \
  ++actor_rollout_ref.fsdp_config.cpu_offload=true \
  ++actor_rollout_ref.fsdp_config.offload_params=true \
  actor_rollout_ref.rollout.max_num_seqs=1 \
  actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1 \
  critic.optim.lr=1e-5 \
  critic.model.path=$HOME/models/Qwen/Qwen2.5-0.5B-Instruct \
  critic.ppo_micro_batch_size_per_gpu=1 \
  algorithm.kl_ctrl.kl_coef=0.001 \
  trainer.logger=console \
  trainer.val_before_train=False \
  trainer.n_gpus_per_node=1 \
  trainer.nnodes=1 \
  trainer.save_freq=10 \
  trainer.test_freq=10 \
  trainer.total_epochs=2 @MORE@ 2>&1 | tee verl_demo.log
"""
