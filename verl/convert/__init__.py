"""Other systems' configurations as ours, with a list of what could not be carried. No torch, and no package of theirs.

- ``trl``: a TRL config, as YAML or JSON (``trl grpo --config``) or as the call in a training script.
- ``script``: a verl script in bash with Hydra overrides, or verl's own YAML.
"""

from verl.convert.source import convert_file

__all__ = ["convert_file"]
