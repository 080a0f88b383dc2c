"""What all fuzzers share: how many inputs, which seeds, and what may come out."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from verl.errors import VerlError

LONG = bool(os.environ.get("VERL_FUZZ"))
FACTOR = 50
"""``make fuzz`` draws this many times more inputs, with other seeds each time (hypothesis prints that of a failure)."""


def fuzz(examples: int) -> Callable[[Any], Any]:
    """Settings of one fuzzer: the same ``examples`` inputs in every short run, ``FACTOR`` times more in a long one."""
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
    return settings(
        max_examples=examples * (FACTOR if LONG else 1),
        deadline=None,
        derandomize=not LONG,
        suppress_health_check=slow,
        database=None,
    )


def refused(action: Callable[[], Any]) -> tuple[Any, str | None]:
    """(result, None), or (None, message) of a VerlError. Any other exception passes through: that is the fault."""
    try:
        return action(), None
    except VerlError as error:
        message = str(error)
        assert len(message) > 10 and "Traceback" not in message
        return None, message


texts = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        ["", " ", "\n", "None", "nan", "#### 42", "x" * 5000, "\x00", "\ufeff", "\u2028", "答", "é" * 3, "a b  c "]
    ),
)
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), texts)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=6
)
messages = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.sampled_from(["user", "assistant", "system", "tool", "", "alien"]) | scalars,
            "content": texts | scalars | st.lists(st.fixed_dictionaries({"type": texts, "text": scalars}), max_size=2),
            "tool_calls": values,
        },
    ),
    max_size=4,
)
good_messages = st.lists(
    st.fixed_dictionaries({"role": st.just("user"), "content": st.text(min_size=1, max_size=9)}), min_size=1, max_size=2
)
rows = st.fixed_dictionaries(
    {},
    optional={
        "prompt": texts | messages | good_messages | values,
        "data_source": scalars | st.lists(scalars, max_size=2),
        "reward_model": values | st.fixed_dictionaries({"ground_truth": values}, optional={"style": scalars}),
        "extra_info": values | st.dictionaries(texts, values, max_size=2),
        "ground_truth": values,
        "uid": scalars,
        "index": scalars,
    },
)
