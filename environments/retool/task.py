"""The task: problems from common data sets, and the Python tool.

Invariant: a row is a problem and a final answer in one of the known shapes; any other row is an error with its
number. The reward is :func:`rollouts.rewards.boxed_math`, on the last reply.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

from rollouts.dtypes import Prompt, as_messages
from rollouts.environments.python_tool import PythonToolEnvironment
from rollouts.errors import ConfigError
from rollouts.training.prompt_files import Columns, rows_of

__all__ = ["RetoolEnvironment", "load_maths"]

_EXPECTED = "prompt and label, prompt and reward_model.ground_truth (DAPO), or problem and answer (AIME)"


class RetoolEnvironment(PythonToolEnvironment):
    """Python programs in several turns; a reply without a call is the answer."""

    system_prompt = (
        "Solve the problem step by step. Run Python with the tool where it helps, and print what you want to see. "
        "Finish with the final answer in \\boxed{}."
    )


def load_maths(source: str, *, limit: int | None = None, **columns: Unpack[Columns]) -> list[Prompt]:
    """Problems with final answers, from a file or the hub.

    Args:
        source: as for :func:`~rollouts.training.prompt_files.rows_of`.
        limit: number of different problems to take, from the start.
        columns: names of the columns, as for :func:`rollouts.training.load_prompts`.

    Returns:
        Prompts whose label is the answer. Repeated problems (DAPO's file has each 100 times) are taken once.

    Raises:
        ConfigError: a missing file, a failed download, or a row of another shape, with its number.
    """
    prompts: dict[str, Prompt] = {}
    for place, row in rows_of(source, **columns):
        if limit is not None and len(prompts) >= limit:
            break
        prompt = _prompt(row, place)
        prompts.setdefault("\n".join(message.text for message in prompt.messages), prompt)
    if not prompts:
        raise ConfigError.of("data", str(source), "at least one row")
    return list(prompts.values())


def _prompt(row: Any, place: str) -> Prompt:
    if not isinstance(row, Mapping):
        raise ConfigError.of(place, row, f"an object with {_EXPECTED}")
    plain = {key.lower(): value for key, value in row.items()}
    model = plain.get("reward_model")
    truth = model.get("ground_truth") if isinstance(model, Mapping) else None
    asked = plain.get("prompt", plain.get("problem"))
    answer = next((value for value in (plain.get("label"), truth, plain.get("answer")) if value is not None), None)
    if not asked or answer is None or not str(answer).strip():
        raise ConfigError.of(place, sorted(row), _EXPECTED)
    metadata = plain.get("metadata")
    try:
        return Prompt(as_messages(asked), str(answer).strip(), metadata if isinstance(metadata, Mapping) else {})
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"{place}: {error}") from None
