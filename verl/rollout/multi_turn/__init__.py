"""Rollouts of several turns: the policy speaks, an environment answers (a tool's output, a user's reply), and so on.

One sample row holds the whole conversation after its prompt. Only what the policy sampled is trained: the mask comes
from who gave each token, never from ids.
"""

from verl.rollout.multi_turn.environment import Environment, ToolEnvironment, load_environment, schemas_of
from verl.rollout.multi_turn.settings import MultiTurnSettings
from verl.rollout.multi_turn.stream import Conversations, stream_conversations
from verl.rollout.multi_turn.turns import TurnTemplate

__all__ = [
    "Conversations",
    "Environment",
    "MultiTurnSettings",
    "ToolEnvironment",
    "TurnTemplate",
    "load_environment",
    "schemas_of",
    "stream_conversations",
]
