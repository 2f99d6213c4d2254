"""Rollouts of an endpoint: an aborted reply is continued, and a label stays that of the prompt."""

from __future__ import annotations

from typing import Any

import pytest

from rollouts.dtypes import Endpoint, Message, Prompt
from rollouts.engine import DEMO_MODEL
from rollouts.environments import SingleTurnEnvironment
from rollouts.errors import ConfigError
from rollouts.renderer import load_tokenizer
from rollouts.testing.server import StubServer
from rollouts.training import Status, agent_rollout_to_sample, generate_rollout_batch


async def test_a_reply_that_a_server_aborts_is_continued() -> None:
    """An update that aborts does not lose the prompt: the reply continues after the tokens that it has."""
    tokenizer = load_tokenizer(DEMO_MODEL)
    whole = tokenizer.encode("The answer is 8.<|im_end|>", add_special_tokens=False)
    opening = tokenizer.encode("<|im_start|>", add_special_tokens=False)[0]

    def reply(input_ids: list[int], params: object) -> list[int]:
        """The rest of the reply, after the part that the request contains."""
        begun = len(input_ids) - 1 - input_ids[::-1].index(opening) + 3  # the role and a newline
        return whole[len(input_ids) - begun :]

    async with StubServer(reply, faults=["abort"]) as server:
        sample = await agent_rollout_to_sample(
            prompt="What is 5 + 3?",
            environment_cls=SingleTurnEnvironment,
            endpoint=Endpoint(model=str(DEMO_MODEL), base_url=server.url),
            tokenizer=tokenizer,
        )
        first, second = (request.body["input_ids"] for request in server.requests)
    assert sample.status is Status.COMPLETED
    assert sample.response == "The answer is 8.<|im_end|>"
    assert [*sample.tokens][-len(whole) :] == whole
    assert second == [*first, *whole[: len(second) - len(first)]]
    assert len(second) > len(first)


async def test_an_environment_that_edits_the_label_in_place_changes_no_sample() -> None:
    """Its group keeps one label, as law 5 wants it; the environment has its change."""
    seen: list[object] = []

    class Editing(SingleTurnEnvironment):
        async def start(self, prompt: Prompt) -> list[Message]:
            prompt.label["tries"].append(1)
            seen.append(prompt.label)
            return await super().start(prompt)

    async with StubServer(lambda input_ids, params: [1, 2]) as server:
        sample = await agent_rollout_to_sample(
            prompt=Prompt("What is 5 + 3?", label={"answer": 8, "tries": []}),
            environment_cls=Editing,
            endpoint=Endpoint(model=str(DEMO_MODEL), base_url=server.url),
            tokenizer=load_tokenizer(DEMO_MODEL),
        )
    assert seen == [{"answer": 8, "tries": [1]}]
    assert sample.label == {"answer": 8, "tries": []}


def test_the_arguments_of_slime_are_answered_with_the_path_of_its_function() -> None:
    """At the call: slime does not await what it calls."""
    call: Any = generate_rollout_batch
    with pytest.raises(ConfigError, match=r"slime takes rollouts\.integrations\.slime\.generate_rollout_batch"):
        call(object(), 3, object(), evaluation=False)
