"""The hardware table, held against machines that are not here."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl import notices
from verl.errors import ConfigError
from verl.hardware import Catalogue, Device, check_explicit, choose, environment_dtype, parse_dtype
from verl.hardware.choice import ATTENTIONS, CATALOGUE, DTYPES, ENGINES

EVERYTHING = Catalogue(ENGINES, ATTENTIONS, loss_scaling=True)
P40 = Device("cuda", "Tesla P40", (6, 1), 24 << 30)
T4 = Device("cuda", "Tesla T4", (7, 5), 16 << 30)
H200 = Device("cuda", "NVIDIA H200", (9, 0), 141 << 30)
AMX = Device("cpu", "Xeon", cpu_flags=frozenset({"amx_bf16", "amx_tile"}))
AVX512 = Device("cpu", "Xeon", cpu_flags=frozenset({"avx512_bf16"}))
OLD_CPU = Device("cpu", "Core i5", cpu_flags=frozenset({"avx2", "amx_tile"}))
APPLE = Device("mps", "Apple M2")
MACHINES = [P40, T4, H200, AMX, AVX512, OLD_CPU, APPLE]


@pytest.fixture(autouse=True)
def said():
    notices.reset()
    yield notices.seen
    notices.reset()


@pytest.mark.parametrize(
    ("device", "torch_version", "packages", "expected"),
    [
        # dtype, master, attention, engine, triton, graphs, scaling
        (H200, "2.13.0", {"triton"}, ("bfloat16", "float32", "varlen", "native", True, True, False)),
        (H200, "2.9.1", {"triton"}, ("bfloat16", "float32", "sdpa", "native", True, True, False)),
        (H200, "2.9.1+cu128", {"flash_attn"}, ("bfloat16", "float32", "flash_attn", "native", False, True, False)),
        (T4, "2.13.0", {"triton", "flash_attn"}, ("float16", "float32", "sdpa", "native", True, True, True)),
        (P40, "2.6.0+cu118", {"triton", "flash_attn"}, ("float32", None, "sdpa", "native", False, True, False)),
        (AMX, "2.13.0", {"triton"}, ("bfloat16", "float32", "sdpa", "native", False, False, False)),
        (AVX512, "2.13.0", set(), ("float32", None, "sdpa", "native", False, False, False)),
        (OLD_CPU, "2.13.0", set(), ("float32", None, "sdpa", "native", False, False, False)),
        (APPLE, "2.13.0", set(), ("float32", None, "sdpa", "native", False, False, False)),
    ],
    ids=lambda value: value.name if isinstance(value, Device) else None,
)
def test_table(device, torch_version, packages, expected):
    c = choose(device, torch_version, packages, EVERYTHING)
    got = (c.dtype, c.master_dtype, c.attention, c.rollout_engine, c.triton, c.cuda_graphs, c.grad_scaling)
    assert got == expected


def test_without_loss_scaling_a_turing_card_computes_in_float32():
    catalogue = Catalogue(("hf",), ("sdpa", "eager"), loss_scaling=False)
    choice = choose(T4, "2.13.0", {"triton"}, catalogue)
    assert (choice.dtype, choice.grad_scaling) == ("float32", False)
    with pytest.raises(ConfigError, match=r"dtype=fp16 does not work on .*'Tesla T4'.*loss scaling.*use float32"):
        check_explicit(choice, dtype="fp16")
    assert check_explicit(choice, rollout_dtype="fp16").rollout_dtype == "float16"


@given(
    device=st.sampled_from(MACHINES),
    torch_version=st.sampled_from(["2.6.0", "2.10.0a0", "2.13.0+cu130"]),
    packages=st.sets(st.sampled_from(["triton", "flash_attn", "vllm", "sglang"])),
    catalogue=st.sampled_from([EVERYTHING, CATALOGUE]),
)
def test_nothing_is_chosen_that_does_not_work(device, torch_version, packages, catalogue):
    choice = choose(device, torch_version, packages, catalogue)
    for option in ("dtype", "rollout_dtype", "attention", "rollout_engine"):
        chosen = getattr(choice, option)
        assert f"{option}.{chosen}" not in choice.lacks
        assert choice.reasons[option]
        again = check_explicit(choice, **{option: chosen})
        assert getattr(again, option) == chosen
    assert "dtype.float32" not in choice.lacks
    assert not {"attention.sdpa", "attention.eager"} & set(choice.lacks)
    assert choice.master_dtype == ("float32" if choice.dtype in ("bfloat16", "float16") else None)


@given(
    device=st.sampled_from(MACHINES),
    option=st.sampled_from([("dtype", DTYPES), ("rollout_dtype", DTYPES), ("attention", ATTENTIONS)]),
    data=st.data(),
)
def test_a_wish_is_granted_or_refused_with_a_value_that_works(device, option, data):
    name, values = option
    asked = data.draw(st.sampled_from(values))
    choice = choose(device, "2.13.0", {"triton"}, EVERYTHING)
    try:
        assert getattr(check_explicit(choice, **{name: asked}), name) in (asked, "varlen")
    except ConfigError as error:
        assert device.described in str(error)
        better = str(error).split("use ")[-1].split(" or ")[0]
        assert getattr(check_explicit(choice, **{name: better}), name) == better


def test_refusals_come_together():
    choice = choose(P40, "2.6.0+cu118", {"triton"})
    wishes = {"dtype": "bfloat16", "attention": f"flash_attention_{2}", "rollout_engine": "vllm"}
    with pytest.raises(ConfigError) as caught:
        check_explicit(choice, **wishes, strict_engine=True)
    problems = caught.value.problems
    assert len(problems) == 3
    assert all("'Tesla P40' (compute capability 6.1)" in problem for problem in problems)
    assert "use float32" in problems[0] and "8.0" in problems[0]
    assert "use sdpa or eager" in problems[1]


def test_an_explicit_dtype_moves_everything_that_depends_on_it():
    choice = check_explicit(choose(AMX, "2.13.0", set(), EVERYTHING), dtype="fp32")
    assert (choice.dtype, choice.rollout_dtype, choice.master_dtype) == ("float32", "float32", None)
    assert choice.reasons["dtype"] == "asked for"
    choice = check_explicit(choose(H200, "2.13.0", set(), EVERYTHING), dtype="float16")
    assert choice.grad_scaling and choice.master_dtype == "float32"


def test_asking_does_not_change_the_choice_it_starts_from():
    choice = choose(AMX, "2.13.0", set())
    before = dict(choice.reasons)
    check_explicit(choice, dtype="float32", attention="eager")
    assert choice.reasons == before and choice.dtype == "bfloat16"


def test_flash_attention_means_any_flash_attention():
    asked = f"flash_attention_{2}"
    with_package = choose(H200, "2.9.1", {"flash_attn"}, EVERYTHING)
    assert check_explicit(with_package, attention=asked).attention == "flash_attn"
    torch_own = choose(H200, "2.13.0", set(), EVERYTHING)
    assert check_explicit(torch_own, attention=asked).attention == "varlen"
    with pytest.raises(ConfigError, match="unknown"):
        check_explicit(torch_own, attention="flashy")


def test_an_engine_that_cannot_run_falls_back_aloud_or_is_an_error(said):
    choice = choose(OLD_CPU, "2.13.0", set())
    assert check_explicit(choice, rollout_engine="vllm").rollout_engine == "native"
    assert len(said()) == 1 and "vllm" in said()[0] and "'native'" in said()[0]
    with pytest.raises(ConfigError, match="strict"):
        check_explicit(choice, rollout_engine="vllm", strict_engine=True)
    with pytest.raises(ConfigError, match="unknown"):
        check_explicit(choice, rollout_engine="vlm")
    on_old_card = choose(P40, "2.6.0", {"vllm"}, EVERYTHING)
    assert "7.0" in on_old_card.lacks["rollout_engine.vllm"]
    assert "pip install vllm" in choose(H200, "2.13.0", set(), EVERYTHING).lacks["rollout_engine.vllm"]


def test_slow_wishes_are_granted_aloud(said):
    assert check_explicit(choose(OLD_CPU, "2.13.0", set()), dtype="bfloat16").dtype == "bfloat16"
    assert "emulated" in said()[0]
    check_explicit(choose(P40, "2.6.0", set(), EVERYTHING), dtype="half")
    assert "fraction" in said()[1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bf16", "bfloat16"),
        ("torch.float16", "float16"),
        ("Half", "float16"),
        ("float", "float32"),
        ("BFloat16", "bfloat16"),
        ("auto", None),
        ("", None),
        (None, None),
    ],
)
def test_dtypes_as_people_write_them(text, expected):
    assert parse_dtype(text, "rollout.dtype") == expected


def test_rollout_dtype_from_the_environment():
    assert environment_dtype({"VLLM_DTYPE": "float32"}) == "float32"
    assert environment_dtype({}) is None
    with pytest.raises(ConfigError, match=r"VLLM_DTYPE=floaty32 is not a dtype; there are auto, bfloat16"):
        environment_dtype({"VLLM_DTYPE": "floaty32"})
    chosen = check_explicit(choose(AMX, "2.13.0", set()), rollout_dtype=environment_dtype({"VLLM_DTYPE": "float32"}))
    assert (chosen.dtype, chosen.rollout_dtype) == ("bfloat16", "float32")
