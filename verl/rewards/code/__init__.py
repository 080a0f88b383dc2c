"""Scoring programs: the answer's code is run against tests, apart from the run (:mod:`verl.rewards.code.sandbox`)."""

from verl.rewards.code.sandbox import Limits, Outcome, enforced_here, run_program
from verl.rewards.code.scorer import compute_score, extract_program

__all__ = ["Limits", "Outcome", "compute_score", "enforced_here", "extract_program", "run_program"]
