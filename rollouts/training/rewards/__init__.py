"""Reward functions: rules, remote servers, LLM judges and weighted sums; each is the ``reward_fn`` of a config.

A reward that cannot be computed is a :class:`~rollouts.errors.RewardFailure`, never 0. Bind options with ``partial``.
"""

from rollouts.training.rewards.answers import final_answer, final_choice, final_number, final_reply
from rollouts.training.rewards.code import code_tests
from rollouts.training.rewards.llm_judge import Judge, LLMJudge, Verdict
from rollouts.training.rewards.math import boxed_math
from rollouts.training.rewards.processes import in_process
from rollouts.training.rewards.remote import RemoteReward
from rollouts.training.rewards.rules import exact_match, f1_score, multiple_choice, numeric_match
from rollouts.training.rewards.scoring import score, score_group
from rollouts.training.rewards.weighted import WeightedGroupSum, WeightedSum, brevity, each

__all__ = [
    "Judge",
    "LLMJudge",
    "RemoteReward",
    "Verdict",
    "WeightedGroupSum",
    "WeightedSum",
    "boxed_math",
    "brevity",
    "code_tests",
    "each",
    "exact_match",
    "f1_score",
    "final_answer",
    "final_choice",
    "final_number",
    "final_reply",
    "in_process",
    "multiple_choice",
    "numeric_match",
    "score",
    "score_group",
]
