"""A fake trainer: slime's namespace, a data source that counts its groups, and rollouts of chosen sizes.

``Launch`` is what a test starts from. Its recipe's rollouts need no server: each is made by ``Launch.play``, which a
test may replace, and is what a model would have given: a prompt, one sampled reply, logprobs and versions.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence, Set
from typing import Any

import anyio.lowlevel
import attrs

from rollouts.dtypes import Endpoint, VersionSpan
from rollouts.environments.single_turn import SingleTurnEnvironment
from rollouts.integrations.slime.records import records
from rollouts.recipe import Recipe
from rollouts.training import DataBuffer, Prompt, RolloutConfig, Sample, Status
from rollouts.trajectory import CompletionRecord

LAUNCHES: dict[str, Launch] = {}
"""By name, so that a recipe's path can find its test."""

DEFAULT: dict[str, Any] = dict.fromkeys(
    ("rollouts_carry_over", "rollouts_over_sampling_factor", "rollouts_recipe_filter")
)
"""Flags of a launch with none of our own keys but the recipe."""

Play = Callable[[Prompt], Awaitable[Sequence[Sample]]]


class Source:
    """A data source like slime's: endless numbered groups, returned groups first."""

    def __init__(self, n_samples_per_prompt: int, groups: int | None = None) -> None:
        self.n_samples_per_prompt = n_samples_per_prompt
        self.left = groups
        self.given: list[int] = []
        self.added: list[list[Any]] = []

    def __len__(self) -> int:
        return 1000

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        groups = []
        while len(groups) < num_samples and self.left != 0:
            if self.added:
                groups.append(self.added.pop(0))
                continue
            number = len(self.given)
            self.given.append(number)
            self.left = None if self.left is None else self.left - 1
            groups.append(
                [
                    records().sample(
                        group_index=number,
                        index=number * self.n_samples_per_prompt + member,
                        prompt=f"prompt {number}",
                        label=str(number),
                        metadata={"row": number},
                    )
                    for member in range(self.n_samples_per_prompt)
                ]
            )
        return groups

    def add_samples(self, samples: list[list[Any]]) -> None:
        assert all(len(group) == self.n_samples_per_prompt for group in samples)
        self.added += samples


def made_sample(
    prompt: Prompt, *, reply: int = 4, before: int = 3, version: str = "1", branch: int = 0, **fields: Any
) -> Sample:
    """A rollout of one reply: ``before`` prompt tokens, a reply, a tool's answer of two tokens, and a reply again."""
    sampled = [*range(before, before + reply), *range(before + reply + 2, before + 2 * reply + 2)]
    length = before + 2 * reply + 2
    mask = [int(position in sampled) for position in range(length)]
    values: dict[str, Any] = {
        "prompt": prompt.prompt,
        "response": f"reply {prompt.index}/{branch}",
        "tokens": [100 + position for position in range(length)],
        "loss_mask": mask,
        "rollout_log_probs": [-0.5 * bit for bit in mask],
        "versions": [
            VersionSpan(version, before, before + reply),
            VersionSpan(version, before + reply + 2, length),
        ],
        "completions": [
            CompletionRecord("a", before, before + reply, "stop", 0, 0, 0.1),
            CompletionRecord("b", before + reply + 2, length, "stop", 0, before, 0.1),
        ],
        "metadata": dict(prompt.metadata),
        "label": prompt.label,
        "status": Status.COMPLETED,
        "metrics": {"environment_seconds": 0.25},
    }
    return Sample(**{**values, **fields})


@attrs.define(eq=False)
class Launch:
    """One launch: sizes, the outcome of rollouts, reward and filter."""

    batch_size: int = 2
    n: int = 2
    play: Play | None = None
    reward: Any = None
    filter_fn: Any = None
    over_sampling_factor: float = 1.5
    played: Counter[int] = attrs.field(factory=Counter)
    """The number of rollouts played, by our group index."""

    def args(self, **overrides: Any) -> Namespace:
        """slime's namespace for it: over-sampled, carried from call to call, and with the launch's filter."""
        name = f"launch {len(LAUNCHES)}"
        LAUNCHES[name] = self
        values = {
            "rollout_batch_size": self.batch_size,
            "n_samples_per_prompt": self.n,
            "over_sampling_batch_size": self.batch_size,
            "rollout_temperature": 1.0,
            "rollout_top_p": 1.0,
            "rollout_top_k": -1,
            "rollout_max_response_len": 32,
            "hf_checkpoint": "nowhere",
            "sglang_router_ip": "127.0.0.1",
            "sglang_router_port": 9,
            "rollouts_over_sampling_factor": self.over_sampling_factor,
            "rollouts_carry_over": True,
            "rollouts_recipe_filter": True,
            "rollouts_recipe": f"{__name__}.recipe",
            "rollouts_recipe_options": {"name": name},
            "reward_key": None,
            "advantage_estimator": "grpo",
            "rewards_normalization": True,
            "grpo_std_normalization": True,
        }
        return Namespace(**{**values, **overrides})

    def source(self, groups: int | None = None) -> Source:
        return Source(self.n, groups)

    async def generate(self, prompts: Sequence[Prompt]) -> list[Sample]:
        (prompt,) = prompts
        assert prompt.group_index is not None
        self.played[prompt.group_index] += 1
        await anyio.lowlevel.checkpoint()
        return [made_sample(prompt)] if self.play is None else list(await self.play(prompt))

    def score(self, sample: Sample) -> float:
        assert sample.index is not None
        return float(sample.index % 2)


def recipe(endpoint: Endpoint, *, name: str) -> Recipe:
    """The recipe of a launch, by its name."""
    launch = LAUNCHES[name]
    return Recipe(
        name=name,
        config=RolloutConfig(
            batch_size=launch.batch_size,
            n_samples_per_prompt=launch.n,
            over_sampling_factor=launch.over_sampling_factor,
            generate_fn=functools.partial(Launch.generate, launch),
            reward_fn=launch.reward or launch.score,
            filter_fn=launch.filter_fn,
        ),
        data_buffer=DataBuffer(["never used"]),
        endpoint=endpoint,
        tokenizer="nowhere",
        environment_cls=SingleTurnEnvironment,
    )


def set_every_field(sample: Any, *, kept: Set[str]) -> None:
    """Set every field of a framework's sample but those to keep: with sound values, unknown ones with their name."""
    known = {
        "tokens": [5, 6, 7, 8],
        "response": "a reply",
        "response_length": 3,
        "loss_mask": [1, 0, 1],
        "rollout_log_probs": [-0.5, 0.0, -0.25],
        "status": type(sample).Status.TRUNCATED,
        "remove_sample": sample.index % 2 == 1,
        "reward": 0.5,
        "weight_versions": ["7", "8"],
        "non_generation_time": 1.5,
        "metadata": {**sample.metadata, "raw_reward": 3.0},
    }
    for name in sample.__dataclass_fields__:
        if name not in kept:
            setattr(sample, name, known.get(name, {"set by": "generate", "field": name}))
