"""Export of trajectories as OpenReward's events: to a file first, and from there to its API.

Invariant: a trajectory is in the file before it is sent, and unconfirmed events are sent again: ``FILE.sent`` contains
the number of confirmed bytes. A part of an event is never sent. No error here fails a rollout.

    python -m rollouts.recipes.environments.openreward.export trajectories.jsonl     # sends unconfirmed events
"""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from rollouts.base.storable import to_json
from rollouts.base.terminal import say
from rollouts.dtypes import chat_text
from rollouts.environments.ors import CallRecord
from rollouts.errors import EndpointUnavailable
from rollouts.http.client import HttpClient
from rollouts.recipes.environments.openreward.config import KEY, api_url
from rollouts.training import Sample

__all__ = ["Trajectories", "events_of"]

_BATCH = 128
_PATIENCE = 10.0


def events_of(
    sample: Sample, calls: Sequence[CallRecord], *, run_name: str, now: int | None = None
) -> list[dict[str, Any]]:
    """Convert a rollout to events: one for its start, then one for each message, thought, call and result.

    Args:
        sample: a finished sample.
        calls: the environment's calls, with their rewards.
        run_name: name of the training run.
        now: milliseconds since 1970.
    """
    now = int(time.time() * 1000) if now is None else now
    known = sample.metadata
    number = str(uuid.uuid4())
    name = known.get("env_name")
    counters = {key: known.get(key) for key in ("stop_reason", "num_tool_calls")}
    total = sum(call.reward for call in calls if call.reward is not None)
    begun = {
        "eventId": number,
        "timestamp": now,
        "runName": run_name,
        "rolloutName": f"{name}-{known.get('task_hash', 'unknown')}-{number[:8]}",
        "environment": name,
        "split": known.get("split"),
        "task_spec": known.get("task_spec"),
        "metadata": {**counters, "reward_sum": total if sample.step_rewards else None, "reward": sample.reward},
        "eventType": "rollout",
    }
    messages = [
        {
            "eventId": str(uuid.uuid4()),
            "timestamp": now,
            "index": index,
            "rolloutEventId": number,
            "isFinished": False,
            "metadata": {},
            **fields,
            "eventType": "message",
        }
        for index, fields in enumerate(_messages(sample.messages, calls))
    ]
    return [_without_nothing(event) for event in [begun, *messages]]


def _messages(messages: Iterable[Mapping[str, Any]], calls: Sequence[CallRecord]) -> Iterable[dict[str, Any]]:
    by_id = {call.id: call for call in calls if call.id}
    answered: set[str] = set()
    kinds = {"system": "system_message", "user": "user_message", "assistant": "assistant_message"}
    for chat in messages:
        number = chat.get("tool_call_id") or ""
        if chat["role"] == "tool":
            answered.add(number)
            yield _result(number, chat["content"], by_id.get(number))
            continue
        if chat.get("reasoning_content"):
            yield {"type": "reasoning", "content": _clean(chat["reasoning_content"])}
        if chat.get("content", "").strip():
            yield {"type": kinds[chat["role"]], "content": _clean(chat["content"].strip())}
        for call in chat.get("tool_calls") or ():
            arguments = to_json(call["function"]["arguments"]).decode()
            yield {
                "type": "tool_call",
                "name": call["function"]["name"] or "?",
                "content": arguments,
                "callId": call["id"],
            }
    for call in calls:  # results of the last turn, and of the terminal tool
        if call.id not in answered:
            yield _result(call.id or "terminal", chat_text(call.text), call)


def _result(number: str, text: str, call: CallRecord | None) -> dict[str, Any]:
    event: dict[str, Any] = {"type": "tool_result", "content": _clean(text), "callId": number}
    if call is not None:
        event |= {"reward": call.reward, "isFinished": call.finished}
        event |= {"metadata": call.metadata} if isinstance(call.metadata, dict) else {}
    return event


def _clean(text: str) -> str:
    return text.replace("\x00", "").encode("utf-8", "backslashreplace").decode()


def _without_nothing(event: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_nothing(value) if isinstance(value, dict) else value
        for key, value in event.items()
        if value is not None
    }


class Trajectories:
    """A file of events, and the number of bytes sent.

    Args:
        path: one event a line; appended to.
        key: API key; without it nothing is sent.
        url: URL of the API.
    """

    def __init__(self, path: str | Path, *, key: str | None = None, url: str | None = None) -> None:
        self.path = Path(path)
        self._key = key
        self._url = (url or api_url()).rstrip("/")
        self._writing = anyio.Lock()
        self._sending = anyio.Lock()
        self.problem = ""
        """The reason why the last attempt to send failed."""

    def __repr__(self) -> str:
        return f"<Trajectories in {self.path}, {self.left} bytes to send>"

    @property
    def left(self) -> int:
        """Bytes that have not been confirmed."""
        size = self.path.stat().st_size if self.path.exists() else 0
        return size - self._sent()

    async def add(self, sample: Sample, calls: Sequence[CallRecord], *, run_name: str) -> None:
        """Write a rollout; then send unconfirmed events, unless another task is sending."""
        lines = b"".join(to_json(event) + b"\n" for event in events_of(sample, calls, run_name=run_name))
        async with self._writing:
            await anyio.to_thread.run_sync(self._append, lines)
        if self._key and not self._sending.statistics().locked:
            with anyio.move_on_after(_PATIENCE):
                await self.send()

    async def send(self) -> int:
        """Send unconfirmed events in batches; returns the number confirmed. ``problem`` has the failure."""
        if not self._key:
            self.problem = f"no key ({KEY})"
            return 0
        async with self._sending:
            transport = HttpClient(connect_seconds=5.0)
            confirmed = 0
            try:
                while batch := await anyio.to_thread.run_sync(self._batch):
                    events = [msgspec.Raw(line) for line in batch.splitlines() if _is_event(line)]
                    headers = {"Content-Type": "application/json", "x-api-key": self._key}
                    body = msgspec.json.encode({"events": events})
                    status, answer = await transport.post(f"{self._url}/v1/rollouts", body, headers)
                    if status >= 300:
                        self.problem = f"status {status}: {answer[:200].decode(errors='replace')}"
                        break
                    await anyio.to_thread.run_sync(self._confirm, len(batch))
                    confirmed, self.problem = confirmed + len(events), ""
            except EndpointUnavailable as error:
                self.problem = str(error)
            finally:
                await transport.aclose()
            return confirmed

    @property
    def _mark(self) -> Path:
        return self.path.with_name(self.path.name + ".sent")

    def _append(self, lines: bytes) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+") as file:
            file.seek(max(0, file.tell() - 1))
            if file.read(1) not in (b"", b"\n"):  # a killed process left a part of a line
                lines = b"\n" + lines
            file.write(lines)

    def _sent(self) -> int:
        return int(self._mark.read_text()) if self._mark.exists() else 0

    def _batch(self) -> bytes:
        """The next complete lines."""
        if not self.path.exists():
            return b""
        with self.path.open("rb") as file:
            file.seek(self._sent())
            lines = [line for line, _ in zip(file, range(_BATCH), strict=False)]
        return b"".join(line for line in lines if line.endswith(b"\n"))

    def _confirm(self, size: int) -> None:
        fresh = self._mark.with_suffix(".new")
        fresh.write_text(str(self._sent() + size))
        fresh.replace(self._mark)


def _is_event(line: bytes) -> bool:
    try:
        msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return True


async def _send_rest(path: str) -> int:
    trajectories = Trajectories(path, key=os.environ.get(KEY))
    confirmed = await trajectories.send()
    say(f"{confirmed} events sent, {trajectories.left} bytes left {trajectories.problem}".rstrip())
    return 1 if trajectories.left else 0


if __name__ == "__main__":
    sys.exit(anyio.run(_send_rest, sys.argv[1]))
