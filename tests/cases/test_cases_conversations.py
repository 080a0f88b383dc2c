"""Public case B37: a conversation that goes on has the ids of the whole conversation."""

from __future__ import annotations

from tiny_models import make_tokenizer

from verl.rollout.multi_turn import TurnTemplate

QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_B37_a_tool_turn_after_an_assistant_turn_keeps_the_line_end():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = QWEN
    turns = TurnTemplate(tokenizer)
    prompt = [{"role": "user", "content": "1+2?"}]
    answer = {"role": "assistant", "content": "add(1,2)"}
    reply = {"role": "tool", "content": "3"}
    first = list(turns.prompts.encode_many([prompt])[0])
    sampled = tokenizer("add(1,2)<|im_end|>", add_special_tokens=False)["input_ids"]
    more = turns.continuation(prompt, [*prompt, answer, reply], sampled[-1])
    whole = tokenizer.apply_chat_template([*prompt, answer, reply], tokenize=False, add_generation_prompt=True)
    assert [*first, *sampled, *more] == tokenizer(whole, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(more).startswith("\n<|im_start|>tool")
