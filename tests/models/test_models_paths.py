"""A model path that is not there: the error names what is near."""

from __future__ import annotations

import pytest

from verl.errors import ModelError
from verl.models.loading import resolve_model_path


def test_a_missing_model_names_the_near_match(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "models" / "Tiny-0.5B").mkdir(parents=True)
    (tmp_path / "models" / "Tiny-0.5B.json").write_text("{}")
    for path in ("$HOME/models/Org/Tiny-0.5B", "~/models/Org/Tiny-0.5b", str(tmp_path / "elsewhere" / "Tiny-0.5B")):
        with pytest.raises(ModelError, match=r"There is no model folder at .*Did you mean models/Tiny-0\.5B\?$"):
            resolve_model_path(path)
    with pytest.raises(ModelError, match=r"no config\.json\.$"):
        resolve_model_path("models/Tiny-0.5B")
    (tmp_path / "models" / "Tiny-0.5B" / "config.json").write_text("{}")
    assert resolve_model_path("models/Tiny-0.5B") == "models/Tiny-0.5B"
    assert resolve_model_path("org/name") == "org/name"
