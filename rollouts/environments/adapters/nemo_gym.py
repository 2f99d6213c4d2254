"""Resources servers of NeMo Gym: tools over HTTP, and a reward for the whole conversation.

Invariant: one session for each rollout, which is the server's cookie. A call is ``POST /<tool>``, its answer the text
that the model reads, as NeMo Gym's simple agent does it; ``POST /verify`` at the end of the episode gives the reward.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import msgspec

from rollouts.dtypes import Message, Prompt, Tool
from rollouts.environments.adapters.calls import numbers_of
from rollouts.environments.base import StepResult, bad_step
from rollouts.errors import ConfigError, shortened
from rollouts.http.client import HttpClient

__all__ = ["NeMoGymEnvironment", "row_to_prompt"]

_PARAMS = "responses_create_params"
_ECHOED = (_PARAMS, "response", "reward")


def row_to_prompt(row: Mapping[str, Any]) -> Prompt:
    """Convert a row of a NeMo Gym data set to a prompt; the row is its metadata.

    Raises:
        ConfigError: it has no ``responses_create_params``, or its input has an item that is neither text nor an image.
    """
    given = row.get(_PARAMS)
    if not isinstance(given, Mapping) or "input" not in given:
        raise ConfigError.of(f"row[{_PARAMS!r}]", given, "an object with input, and the tools if there are any")
    items = given["input"]
    if isinstance(items, str):
        return Prompt(items, metadata=dict(row))
    return Prompt([_message(item) for item in items], metadata=dict(row))


class NeMoGymEnvironment:
    """One session of a resources server. Bind it with ``functools.partial``; :func:`row_to_prompt` makes the prompts.

    A reply without a call ends the episode. A rollout that a limit ends is not verified; bind a ``reward_fn`` to score
    it.

    Args:
        base_url: the server's URL.
        seconds: the longest wait for one answer of the server.
    """

    def __init__(self, base_url: str, *, seconds: float = 60.0) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError.of("NeMoGymEnvironment.base_url", base_url, "a URL that starts with http:// or https://")
        self.base_url, self._seconds = base_url.rstrip("/"), seconds
        self._http = HttpClient(connect_seconds=seconds)
        self._cookies: dict[str, str] = {}
        self._row: Mapping[str, Any] = {}
        self._output: list[dict[str, Any]] = []

    @property
    def tools(self) -> Sequence[Tool]:
        return tuple(_tool(entry) for entry in self._row.get(_PARAMS, {}).get("tools") or ())

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        self._row = dict(row_to_prompt(prompt.metadata).metadata)
        self._decoded("seed_session", *await self._post("seed_session", self._row))
        return prompt.messages

    async def step(self, reply: Message) -> StepResult:
        self._output += _items(reply)
        if not reply.tool_calls:
            return await self._verify()
        messages, failed = [], 0
        for call in reply.tool_calls:
            status, payload = await self._post(call.name, dict(call.arguments))
            failed += status >= 400  # a message to the model nevertheless, as in NeMo Gym
            text = payload.decode(errors="replace")
            self._output.append({"type": "function_call_output", "call_id": call.id, "output": text})
            messages.append(Message("tool", text, tool_call_id=call.id, name=call.name))
        return StepResult(messages, metrics={"tool_errors": failed})

    async def close(self) -> None:
        await self._http.aclose()

    async def _verify(self) -> StepResult:
        params = self._row[_PARAMS]
        response = {
            "id": f"resp_{uuid.uuid4().hex}",
            "created_at": time.time(),
            "model": params.get("model") or "rollouts",
            "object": "response",
            "output": self._output,
            "parallel_tool_calls": params.get("parallel_tool_calls", True),
            "tool_choice": params.get("tool_choice", "auto"),
            "tools": params.get("tools") or [],
        }
        answer = self._decoded("verify", *await self._post("verify", {**self._row, "response": response}))
        if "reward" not in answer:
            raise bad_step("verify", f"got {shortened(answer)}; expected an object with reward")
        metrics = numbers_of({name: value for name, value in answer.items() if name not in _ECHOED}, "verify")
        given = {name: value for name, value in metrics.items() if name not in self._row}
        return StepResult(done=True, reward=answer["reward"], metrics=given)

    async def _post(self, path: str, body: Any) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json"}
        if self._cookies:
            headers["Cookie"] = "; ".join(f"{name}={value}" for name, value in self._cookies.items())
        with anyio.fail_after(self._seconds):
            async with self._http.open(
                "POST", f"{self.base_url}/{path}", headers, msgspec.json.encode(body)
            ) as response:
                payload = await response.read()
                name, _, value = response.headers.get("set-cookie", "").partition(";")[0].partition("=")
        if name:
            self._cookies[name] = value
        return response.status, payload

    def _decoded(self, path: str, status: int, payload: bytes) -> Any:
        if status != 200:
            shown = shortened(payload.decode(errors="replace"))
            raise bad_step(f"{self.base_url}/{path}", f"got status {status}, {shown}; expected 200")
        return msgspec.json.decode(payload)


def _message(item: Mapping[str, Any]) -> Message:
    """A message of the Responses API; its text parts have other names than in the chat format."""
    content = item.get("content")
    if item.get("type", "message") != "message" or "role" not in item:
        raise ConfigError.of(f"{_PARAMS}.input", item, "messages of texts and images")
    if isinstance(content, list):
        content = [_part(part) for part in content]
    return Message.from_chat({"role": item["role"], "content": content})


def _part(part: Any) -> Any:
    if not isinstance(part, Mapping) or part.get("type") == "input_image":
        return part
    return {**part, "type": "text"}


def _tool(entry: Mapping[str, Any]) -> Tool:
    if entry.get("type") != "function":
        raise ConfigError.of(f"{_PARAMS}.tools", entry, "tools of type function")
    return Tool.from_chat({name: value for name, value in entry.items() if name != "type"})


def _items(reply: Message) -> list[dict[str, Any]]:
    """A reply as output items of the Responses API."""
    items: list[dict[str, Any]] = []
    number = uuid.uuid4().hex
    if reply.reasoning:
        summary = [{"type": "summary_text", "text": reply.reasoning}]
        items.append({"id": f"rs_{number}", "type": "reasoning", "summary": summary})
    if reply.text or not reply.tool_calls:
        content = [{"type": "output_text", "text": reply.text, "annotations": []}]
        kind = {"type": "message", "role": "assistant", "status": "completed"}
        items.append({"id": f"msg_{number}", **kind, "content": content})
    for call in reply.tool_calls:
        arguments = msgspec.json.encode(dict(call.arguments)).decode()
        items.append({"type": "function_call", "call_id": call.id, "name": call.name, "arguments": arguments})
    return items
