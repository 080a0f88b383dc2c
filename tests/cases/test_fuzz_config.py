"""Configurations from outside: any override, file or dict gives a configuration or a message, never a traceback."""

from __future__ import annotations

import typing

import pytest
import yaml
from cases_fuzz import fuzz, refused, scalars, texts, values
from hypothesis import given
from hypothesis import strategies as st

from verl.config import LEAVES, load_config, resolve, to_yaml, validate
from verl.config.compat import RENAMES
from verl.config.fields import get

KEYS = [*LEAVES, *RENAMES, "data", "algorithm.kl_ctrl", "actor_rollout_ref", "nonsense", "data.nonsense", "critic"]
keys = st.sampled_from(KEYS)
spellings = st.one_of(
    st.sampled_from(
        ["1", "0", "-1", "true", "null", "[]", "{}", "[1,2]", "{a: 1}", "1e-6", "nan", "inf", "-inf", "1e999",
         "''", '"', "'", "\\", "${data.seed}", "${nope}", "${", "${oc.env:NOPE}", "${data.train_files}", "a,b",
         "range(3)", "choice(a,b)", "glob(*)", "~/x", "$HOME", "$NOPE/x", "???", "grpo", "auto", "=", "a=b",
         " ", "(", "[", "{", "*", "%", "\n", "\x00", "答", "int(3)", "str([1])", "float(nan)", "1_000", "0x10",
         "007", "!!python/object:os.system", "9" * 400]
    ),
    st.text(max_size=12),
    st.integers().map(str),
    st.floats().map(str),
)  # fmt: skip
overrides = st.one_of(
    st.builds("{}{}={}".format, st.sampled_from(["", "", "+", "++", "~", "+++", "@", "-"]), keys, spellings),
    st.builds("~{}".format, keys),
    st.text(max_size=20),
    st.builds("{}={}".format, st.text(max_size=10), spellings),
)


def used(config):
    """Everything that a run does with a configuration before it loads something."""
    validate(config, need_data=False, need_model=False, has_validation=True)
    return to_yaml(resolve(config))


def is_a(value, hint):
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is typing.Any:
        return True
    if origin is list:
        return isinstance(value, list) and all(is_a(item, inner[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict)
    if inner:
        return any(is_a(value, option) for option in inner)
    return type(value) is hint or (hint is float and type(value) is int)


def check_types(config):
    """Every value has the type that its option declares."""
    for key, leaf in LEAVES.items():
        assert is_a(get(config, key), leaf.hint), f"{key}={get(config, key)!r}"


@given(drawn=st.lists(overrides, max_size=3))
@fuzz(150)
def test_any_overrides(drawn):
    config, message = refused(lambda: load_config(drawn))
    assert (config is None) == (message is not None)
    if config is not None:
        check_types(config)
        refused(lambda: used(config))


@given(key=st.sampled_from([k for k, leaf in LEAVES.items() if leaf.hint is not typing.Any]), value=scalars | values)
@fuzz(60)
def test_any_value_for_any_option(key, value):
    config, message = refused(lambda: load_config(values={key: value}))
    if config is None:
        assert key.rpartition(".")[2] in message or "interpolation" in message.lower() or "resolv" in message.lower()
        return
    check_types(config)
    _, message = refused(lambda: used(config))
    if message is None and not isinstance(value, (str, dict, list)) and value is not None:
        assert get(config, key) == value or str(get(config, key)).lower() == str(value).lower()


@given(
    content=values | st.dictionaries(keys, values, max_size=3),
    raw=st.none() | st.binary(max_size=40) | texts.map(lambda t: t.encode("utf-8", "replace")),
)
@fuzz(50)
def test_any_file(tmp_path_factory, content, raw):
    file = tmp_path_factory.getbasetemp() / "drawn.yaml"
    file.write_bytes(yaml.safe_dump(content).encode("utf-8", "surrogatepass") if raw is None else raw)
    config, message = refused(lambda: load_config(file=file))
    assert (config is None) == (message is not None)
    if config is not None:
        check_types(config)


def typed(leaf):
    """Values that an option may well have."""
    kinds = typing.get_args(leaf.hint) or (leaf.hint,)
    if leaf.about.choices is not None and list not in [typing.get_origin(kind) or kind for kind in kinds]:
        return st.sampled_from(leaf.about.choices)
    drawn = {int: st.integers(1, 9), float: st.floats(0.1, 0.9), bool: st.booleans(), str: texts, type(None): st.none()}
    return st.one_of(*(drawn[kind] for kind in kinds if kind in drawn), st.just(leaf.default))


@given(data=st.data(), drawn=st.lists(st.sampled_from([k for k in LEAVES if k != "reward.reward_fn"]), max_size=3))
@fuzz(25)
def test_what_was_loaded_is_written_and_read_back_unchanged(tmp_path_factory, data, drawn):
    config, _ = refused(lambda: load_config(values={key: data.draw(typed(LEAVES[key])) for key in drawn}))
    if config is None:
        return
    text, message = refused(lambda: used(config))
    if message is not None:
        return
    file = tmp_path_factory.getbasetemp() / "resolved.yaml"
    file.write_text(text, encoding="utf-8")
    again, wanted = load_config(file=file), resolve(config)
    for key in LEAVES:
        assert get(again, key) == get(wanted, key), key


@pytest.mark.parametrize("name", [[], {}, ["grpo"], 3, True])
def test_a_preset_that_is_no_name_is_told(name):
    _, message = refused(lambda: load_config(values={"preset": name}))
    assert message is not None and "algorithm.name" in message
