"""An agent of Harbor that speaks through Harbor's own chat, with known ids and logprobs; it needs Harbor."""

from __future__ import annotations

import json
import random
from typing import Any

from harbor.agents.base import BaseAgent
from harbor.llms.base import BaseLLM, LLMResponse
from harbor.llms.chat import Chat
from harbor.models.trajectories import Agent, Metrics, Step, Trajectory

from tests.audit.dumps import conversations, encode


class KnownModel(BaseLLM):  # type: ignore[misc]
    """Gives the replies of a conversation, with the ids that it was shown."""

    def __init__(self, turns: list[tuple[str, str]], rng: random.Random) -> None:
        super().__init__()
        self.turns, self.rng, self.tokens = iter(turns), rng, list[int]()

    async def call(self, prompt: str, **options: Any) -> LLMResponse:
        shown, reply = next(self.turns)
        self.tokens, ids = self.tokens + encode(shown), encode(reply)
        response = LLMResponse(
            content=reply,
            prompt_token_ids=self.tokens,
            completion_token_ids=ids,
            logprobs=[-self.rng.expovariate(1) for _ in ids],
        )
        self.tokens = self.tokens + ids
        return response

    def get_model_context_limit(self) -> int:
        return 1 << 20

    def get_model_output_limit(self) -> int | None:
        return None


class TokenAgent(BaseAgent):  # type: ignore[misc]
    """Plays the conversation of this number."""

    def __init__(self, *args: Any, number: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self.number = number

    @staticmethod
    def name() -> str:
        return "tokens"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: Any) -> None:
        pass

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        one = conversations()[self.number]
        chat, steps = Chat(KnownModel(one.turns, random.Random(self.number))), []
        for number, (shown, _) in enumerate(one.turns):
            reply = await chat.chat(shown)
            metrics = Metrics(
                prompt_token_ids=reply.prompt_token_ids,
                completion_token_ids=reply.completion_token_ids,
                logprobs=reply.logprobs,
            )
            steps.append(Step(step_id=2 * number + 1, source="user", message=shown))
            steps.append(Step(step_id=2 * number + 2, source="agent", message=reply.content, metrics=metrics))
        context.rollout_details = chat.rollout_details
        trajectory = Trajectory(
            session_id=f"s{self.number}", agent=Agent(name=self.name(), version=self.version()), steps=steps
        )
        (self.logs_dir / "trajectory.json").write_text(json.dumps(trajectory.to_json_dict()))
