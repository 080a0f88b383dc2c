"""What a folder's model is for: one that scores is not to be served as one that writes."""

from __future__ import annotations

from verl.errors import ModelError
from verl.models.loading import load_config

SCORERS = ("ForSequenceClassification", "ForTokenClassification")


def require_language_model(path: str, *, trust_remote_code: bool = False) -> None:
    """transformers would load a reward or value model as a language model, with a head that was never trained.

    Raises:
        ModelError: the model at ``path`` scores.
    """
    config = load_config(path, trust_remote_code=trust_remote_code)
    for name in getattr(config, "architectures", None) or []:
        if name.endswith(SCORERS):
            raise ModelError(
                f"{path} is a reward or value model ({name}): it scores and does not write. The folder can be used as "
                "it is, as reward_model.model.path or with AutoModelFor" + name.partition("For")[2] + "."
            )
