"""Reward functions: rules, remote servers, LLM judges and weighted sums; each is the ``reward_fn`` of a config.

A reward that cannot be computed is a :class:`~rollouts.errors.RewardFailure`, never 0. Bind options with ``partial``.
"""

from typing import TYPE_CHECKING

from rollouts.base.lazy_face import lazy_face

if TYPE_CHECKING:
    from rollouts.rewards.answers import final_answer, final_choice, final_number, final_reply
    from rollouts.rewards.code import code_tests
    from rollouts.rewards.llm_judge import Judge, LLMJudge, Verdict
    from rollouts.rewards.math import boxed_math
    from rollouts.rewards.processes import in_process
    from rollouts.rewards.remote import RemoteReward
    from rollouts.rewards.rules import exact_match, f1_score, multiple_choice, numeric_match
    from rollouts.rewards.teachers import Teacher, scored_by_teachers, teachers_as_advantages
    from rollouts.rewards.weighted import WeightedGroupSum, WeightedSum, brevity, each
    from rollouts.training.scoring import score, score_group

__all__ = [
    "Judge",
    "LLMJudge",
    "RemoteReward",
    "Teacher",
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
    "scored_by_teachers",
    "teachers_as_advantages",
]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "rollouts.rewards.answers": ("final_answer", "final_choice", "final_number", "final_reply"),
        "rollouts.rewards.code": ("code_tests",),
        "rollouts.rewards.llm_judge": ("Judge", "LLMJudge", "Verdict"),
        "rollouts.rewards.math": ("boxed_math",),
        "rollouts.rewards.processes": ("in_process",),
        "rollouts.rewards.remote": ("RemoteReward",),
        "rollouts.rewards.rules": ("exact_match", "f1_score", "multiple_choice", "numeric_match"),
        "rollouts.rewards.teachers": ("Teacher", "scored_by_teachers", "teachers_as_advantages"),
        "rollouts.training.scoring": ("score", "score_group"),
        "rollouts.rewards.weighted": ("WeightedGroupSum", "WeightedSum", "brevity", "each"),
    },
)
