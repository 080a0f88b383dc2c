"""What is wrong with a configuration, as a list: for tests of the rules."""

from __future__ import annotations

from verl.config import load_config, validate
from verl.errors import ConfigError


def problems(*given: str) -> list[str]:
    """The problems of these overrides; files and models need not be there."""
    try:
        validate(load_config(["data.train_batch_size=8", *given]), need_data=False, need_model=False)
    except ConfigError as error:
        return list(error.problems)
    return []
