"""The rollouts of stored runs, in the order of their files: what selection and rows need of each.

Invariant: one group is in memory at a time. A rollout has a verdict if it did not fail and has a finite reward; a
rollout without a verdict counts as neither passed nor not passed. This module selects nothing.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from rollouts.base.storable import to_json
from rollouts.base.validators import finite
from rollouts.curation.duplicates import digest_of
from rollouts.dtypes import hashes_in
from rollouts.dtypes.lazy_numpy import np, npt
from rollouts.dtypes.messages import REPLIES
from rollouts.errors import ConfigError
from rollouts.runs.folder import Row, read_rows
from rollouts.runs.info import read_info
from rollouts.runs.reading import reading
from rollouts.runs.tools import ToolFolder
from rollouts.training.evaluation import task_key
from rollouts.training.rows import CHAT_API
from rollouts.training.status import Status

__all__ = ["StoredRollout", "StoredRun", "check_runs", "spoken_in", "text_of"]

_NO_VERDICT = {Status.FAILED.value, Status.ABORTED.value, Status.PENDING.value}


class StoredRun:
    """One run that is read.

    Args:
        path: the run's folder, as the user wrote it.
        number: among the runs of a curation.
        tools: the tools of the rollouts that have none stored, as JSON.

    Raises:
        ConfigError: the folder contains no run.
    """

    def __init__(self, path: str | Path, number: int, tools: str | None = None) -> None:
        self.path, self.number = Path(path), number
        self.info = read_info(path)
        self.digest = hashlib.sha256((self.path / "run.json").read_bytes()).hexdigest()
        self._folder, self._tools = ToolFolder(path), tools

    @property
    def model(self) -> str:
        """The model that sampled, as far as ``run.json`` names it."""
        endpoint = self.info.get("endpoint") or {}
        settings = (self.info.get("settings") or {}).get("model") or {}
        return str(endpoint.get("model") or settings.get("name") or self.info.get("tokenizer") or "unknown")

    def tools(self, row: Mapping[str, Any]) -> str | None:
        """The tools of a row as JSON; ``None`` if they are unknown."""
        sha256 = row.get("tools")
        return self._tools if sha256 is None else self._folder.load(sha256)

    def __iter__(self) -> Iterator[StoredRollout]:
        groups = itertools.groupby(read_rows(self.path, "all"), lambda row: (row.file, row.data.get("group_index")))
        number = 0
        for _, rows in groups:
            task: tuple[Any, Any, str] | None = None
            for _, branches in itertools.groupby(enumerate(rows), _rollout_of):
                whole = [row for _, row in branches]
                with reading(whole[0]):
                    data = whole[0].data
                    if task is None or task[0] != data.get("prompt") or task[1] != data.get("label"):
                        task = (data.get("prompt"), data.get("label"), _task_key(whole[0]))
                    rollout = StoredRollout(self, number, whole, task[2])
                    rollout.check()
                yield rollout
                number += 1


def check_runs(runs: str | Path | Sequence[str | Path], tools: str | None = None) -> list[StoredRun]:
    """The runs of a curation, each once.

    Raises:
        ConfigError: there is none, one of them is not a run, or one is named twice.
    """
    if isinstance(runs, str | Path):
        runs = [runs]
    if not runs:
        raise ConfigError.of("runs", [], "at least one folder of a run")
    found: dict[Path, str | Path] = {}
    for run in runs:
        if Path(run).resolve() in found:
            raise ConfigError.of("runs", str(run), "each run once")
        found[Path(run).resolve()] = run
    return [StoredRun(run, number, tools) for number, run in enumerate(runs)]


def _rollout_of(numbered: tuple[int, Row]) -> tuple[str, Any]:
    number, row = numbered
    rollout_id = row.data.get("rollout_id")
    return ("place", number) if rollout_id is None else ("rollout", rollout_id)


def _task_key(row: Row) -> str:
    try:
        prompt = row.data.get("prompt") or ""
        if not isinstance(prompt, str) and any(True for _ in hashes_in(prompt)):
            return hashlib.sha256(repr([prompt, row.data.get("label")]).encode()).hexdigest()[:12]
        return task_key(prompt, row.data.get("label"))
    except ConfigError as error:
        raise ConfigError(f"{row}: {error}") from None


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a stored message; parts that are not text are left out."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else ()
    return "".join(part.get("text") or "" if isinstance(part, Mapping) else str(part) for part in parts)


def spoken_in(message: Mapping[str, Any]) -> Iterator[str]:
    """The texts of a stored message: its thought, its content, and the name and arguments of each call."""
    for text in (message.get("reasoning_content"), text_of(message)):
        if text:
            yield str(text)
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        yield " ".join([str(function.get("name")), *_leaves(_decoded(function.get("arguments")))])


def _decoded(arguments: Any) -> Any:
    try:
        return msgspec.json.decode(arguments) if isinstance(arguments, str) else arguments
    except msgspec.DecodeError:
        return arguments


def _leaves(value: Any) -> Iterator[str]:
    """The names and values of JSON as text."""
    if isinstance(value, Mapping):
        for name, entry in value.items():
            yield str(name)
            yield from _leaves(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _leaves(entry)
    else:
        yield str(value)


class StoredRollout:
    """One stored rollout: its rows, one for each branch. The rows are as stored, not checked."""

    def __init__(self, run: StoredRun, number: int, rows: Sequence[Row], task: str) -> None:
        self.run, self.number, self.task = run, number, task
        self.rows = rows
        self.branches = [row.data for row in rows]

    def __repr__(self) -> str:
        return f"<rollout {self.number} of {self.run.path}, {len(self.rows)} branches>"

    def check(self) -> None:
        """Read the columns and the facts once: a row that is not a sample raises here, where its place is known."""
        self.facts(1.0)
        for ids, mask in zip(self.ids, self.masks, strict=True):
            if len(ids) != len(mask):
                raise ConfigError.of(f"{self.rows[0]}: loss_mask", f"{len(mask)} values", f"{len(ids)}, as tokens")

    @property
    def place(self) -> tuple[int, int]:
        """The number of the run and of the rollout in it."""
        return self.run.number, self.number

    @property
    def group(self) -> tuple[int, Any]:
        """The run and the group in it."""
        return self.run.number, self.branches[0].get("group_index")

    @cached_property
    def reward(self) -> float | None:
        """The mean reward of its branches; ``None`` without a verdict."""
        rewards = [finite(branch.get("reward")) for branch in self.branches]
        known = [reward for reward in rewards if reward is not None]
        failed = any(branch.get("failure") or branch.get("status") in _NO_VERDICT for branch in self.branches)
        return None if failed or len(known) < len(rewards) else sum(known) / len(known)

    @property
    def has_several_conversations(self) -> bool:
        """Whether its branches are of several seats or conversations, or have unlike rewards: no reward is of all."""
        keys = {(branch.get("seat"), branch.get("conversation") or 0) for branch in self.branches}
        return len(keys) > 1 or len({finite(branch.get("reward")) for branch in self.branches}) > 1

    @cached_property
    def masks(self) -> list[npt.NDArray[np.bool_]]:
        """For each branch, where the policy sampled."""
        return [np.array(branch["loss_mask"], np.bool_) for branch in self.branches]

    @cached_property
    def ids(self) -> list[npt.NDArray[np.int32]]:
        """For each branch, its token ids."""
        return [np.array(branch["tokens"], np.int32) for branch in self.branches]

    @property
    def is_text(self) -> bool:
        """Whether it is of a chat API, which has no token ids."""
        branch = self.branches[0]
        return len(self.branches) == 1 and not branch["tokens"] and CHAT_API in (branch.get("metadata") or {})

    @property
    def by(self) -> str:
        """The model that sampled; of a chat API the last one to answer, as the API names it."""
        if not self.is_text:
            return self.run.model
        source = self.branches[0]["metadata"][CHAT_API]
        return f"{source.get('provider')}/{(source.get('served') or [source.get('model')])[-1]}"

    @cached_property
    def sampled(self) -> int:
        """Number of sampled tokens; of a chat API as many as it counts."""
        if self.is_text:
            return int((self.branches[0].get("metrics") or {}).get("completion_tokens", 0))
        return sum(int(mask.sum()) for mask in self.masks)

    @property
    def versions(self) -> list[str]:
        """The policy versions of its sampled tokens, each once."""
        spans = (span for branch in self.branches for span in branch.get("versions") or ())
        return list(dict.fromkeys(str(span[0]) for span in spans))

    @property
    def requests(self) -> int | None:
        """A digest of its requests and the ids that they sampled, which a copy in another run shares.

        ``None`` if no row names a request. Replies of a chat API have names, too.
        """
        if self.is_text:
            names = [str(name) for name in self.branches[0]["metadata"][CHAT_API].get("replies") or () if name]
            # With the task and the text: some servers give replies one of a thousand names.
            said = [*names, self.task, to_json(self.branches[0].get("messages")).decode()]
            return digest_of(*(text.encode() for text in said)) if names else None
        named = {
            str(completion["request_id"]): branch["tokens"][completion["start"] : completion["stop"]]
            for branch in self.branches
            for completion in branch.get("completions") or ()
        }
        parts = [part for name, ids in named.items() for part in (name.encode(), np.array(ids, np.int32).tobytes())]
        return digest_of(*parts) if parts else None

    @property
    def has_images(self) -> bool:
        """Whether a message or a token is of an image."""
        chats = [message for branch in self.branches for message in branch.get("messages") or ()]
        return any(branch.get("images") for branch in self.branches) or any(True for _ in hashes_in(chats))

    @property
    def prompt_text(self) -> str:
        """The text of the prompt without system messages."""
        prompt = self.branches[0].get("prompt") or ""
        if isinstance(prompt, str):
            return prompt
        return "\n".join(text_of(message) for message in prompt if message.get("role") != "system")

    def texts(self) -> Iterator[str]:
        """The texts of all its messages but system messages."""
        yield self.prompt_text
        for branch in self.branches:
            for message in branch.get("messages") or ():
                if message.get("role") != "system":
                    yield from spoken_in(message)

    def facts(self, passing: float) -> dict[str, Any]:
        """The fields of :data:`rollouts.curation.expression.ROLLOUT_FIELDS`."""
        last = self.branches[-1]
        versions = self.versions
        version: Any = versions[-1] if versions else None
        metrics: dict[str, float] = {}
        for branch in self.branches:
            for name, value in (branch.get("metrics") or {}).items():
                metrics[name] = metrics.get(name, 0) + value
        return {
            "reward": self.reward,
            "passed": self.reward is not None and self.reward >= passing,
            "tokens": sum(len(branch["tokens"]) for branch in self.branches),
            "sampled": self.sampled,
            "turns": int(metrics.get(REPLIES, 0))
            if self.is_text
            else sum(len(branch.get("completions") or ()) for branch in self.branches),
            "branches": len(self.branches),
            "status": last.get("status"),
            "stop_reason": last.get("stop_reason"),
            "version": int(version) if version is not None and version.isdecimal() else version,
            "batch": last.get("batch"),
            "outcome": last.get("outcome"),
            "label": last.get("label"),
            "metadata": last.get("metadata") or {},
            "metrics": metrics,
        }
