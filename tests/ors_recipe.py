"""A recipe whose environment is served over ORS in tests."""

from rollouts.dtypes import Endpoint
from rollouts.environments.base import tool
from rollouts.environments.calculator import CalculatorEnvironment
from rollouts.recipe import Recipe
from rollouts.training import DataBuffer, Prompt, RolloutConfig, Sample, generate_rollout_batch


class Talkative(CalculatorEnvironment):
    """A calculator with a tool that echoes and one that raises."""

    @tool
    def say(self, words: str) -> str:
        """Say it back."""
        return words

    @tool
    def explode(self) -> str:
        """Break."""
        raise RuntimeError("boom")


def scored(sample: Sample) -> float:
    """1.0 if the last message is the answer, else 0.0."""
    return float(sample.messages[-1]["content"] == f"The answer is {sample.label}.")


def recipe(endpoint: Endpoint, *, group_rm: bool = False) -> Recipe:
    """Four sums."""

    def compared(samples: list[Sample]) -> list[float]:
        return [scored(sample) for sample in samples]

    return Recipe(
        name="sums",
        config=RolloutConfig(
            batch_size=1,
            generate_fn=generate_rollout_batch,
            reward_fn=compared if group_rm else scored,
            group_rm=group_rm,
        ),
        data_buffer=DataBuffer([Prompt(f"What is 2 + {number}?", label=str(2 + number)) for number in (2, 3, 4, 5)]),
        endpoint=endpoint,
        tokenizer=endpoint.model,
        environment_cls=Talkative,
    )
