"""Harbor's Trial as an agent function: any agent of Harbor's, on a task of Harbor's, with exact tokens.

Invariants: a limit of the session ends the agent and not the Trial, so that the task is still graded. When the function
returns or is cancelled, the Trial has ended, and nothing is left of its boxes and its folder. The reward is the one of
Harbor where Harbor holds it valid (``TrialResult.reward_valid``); otherwise the rollout fails with a typed cause. No
secret of this process enters a box.

Written for Harbor 0.25.0. Harbor is imported on the first use.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import attrs

from rollouts.concurrency.task_groups import first_error
from rollouts.dtypes import Prompt
from rollouts.errors import ConfigError, EnvironmentFailure, GenerateFailure, RolloutsError, shortened
from rollouts.harbor.boxes import BoxOptions
from rollouts.harbor.grading import FOLDERS
from rollouts.harbor.schema import TaskConfig
from rollouts.harbor.tasks import HarborTask, task_of
from rollouts.harbor.verdict import LostVerdicts, NoVerdict, Reason, Rung, no_verdict, reward_in
from rollouts.harbor.workspace import rungs_of
from rollouts.programs import ModelServer
from rollouts.sandboxes import RunningSandbox, SandboxError
from rollouts.sandboxes.base import GATEWAY_PORT

__all__ = ["HarborAgent", "api_of", "check_variables", "secrets_of", "weak_secrets_of"]

ENVIRONMENT = "rollouts.harbor.environment:RolloutsEnvironment"
_ON_THIS_MACHINE = ("terminus-2", "computer-1", "dspy-rlm")
"""Agents of Harbor that call the model from this process."""
_WITHOUT_MODEL = ("oracle", "nop")
_APIS = {
    "openai_chat_completions": ("openai", "/v1"),
    "openai_responses": ("openai", "/v1"),
    "anthropic_messages": ("anthropic", ""),
}
"""Harbor's names of the gateway's APIs, the preferred first, with Harbor's provider and the end of the base URL."""
_PREFERRED = {"opencode": "anthropic_messages"}
"""Agents that do not work with the first API that Harbor names for them; opencode 1.2 asks its provider ``openai`` for
the Responses API whichever Harbor sets."""
_REASONS: Mapping[str, Reason] = {
    "RewardFileNotFoundError": "missing",
    "RewardFileEmptyError": "empty",
    "VerifierOutputParseError": "unreadable",
    "VerifierTimeoutError": "timeout",
    "RungError": "box",
}
_LOG = logging.getLogger(__name__)
_SECRET = re.compile(r"KEY|SECRET|TOKEN(?!S|IZER)|PASSWORD|CREDENTIAL|AUTH(?!OR(_|S|$))", re.IGNORECASE)
"""Names of variables with secrets. ``GIT_AUTHOR_NAME`` is none, and stands in the files of many tasks, and
``TOKENIZERS_PARALLELISM`` is none."""
_TEMPLATE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")
_LEAST_SECRET = 8
"""Characters of a secret with letters and other characters; a shorter value occurs anywhere."""
_SURE_SECRET = 20
"""Characters of a secret of letters alone, or of digits alone; a shorter one may be a word or a number of a task."""
_WEAK = (
    f"its value is not searched for in what enters a box; expected at least {_LEAST_SECRET} characters, neither "
    f"all letters nor all digits, or at least {_SURE_SECRET}"
)
WARNED: set[str] = set()
"""The variables whose weak values were named in this process."""


class RungError(RuntimeError):
    """The agent's box could not be made ready for the tests; Harbor records the name."""


def _harbor() -> None:
    """Import Harbor, without its telemetry and without litellm's download of a list of prices.

    Raises:
        ConfigError: it is not installed, or this Python is too old for it.
    """
    os.environ.setdefault("HARBOR_TELEMETRY", "0")
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    try:
        import harbor.trial.trial  # noqa: F401 - an extra
    except ImportError as error:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        expected = f"the package harbor, of the extra harbor, with Python 3.12 or newer; this is {version}"
        raise ConfigError(f"an agent of Harbor needs Harbor: {expected} ({error})") from error


def api_of(agent: str) -> str | None:
    """The model API that an agent of Harbor is given, ``None`` for one without a model.

    Raises:
        ConfigError: Harbor has no agent of this name, or the agent takes no URL or speaks none of the gateway's APIs.
    """
    _harbor()
    from harbor.agents.factory import AgentFactory
    from harbor.models.agent.name import AgentName

    if agent in _WITHOUT_MODEL:
        return None
    try:
        cls: Any = AgentFactory.get_agent_class(AgentName(agent))
    except (ValueError, KeyError) as error:
        raise ConfigError.of("agent", agent, f"an agent of Harbor ({error})") from None
    formats = [str(each.value) for each in getattr(cls.MODEL_CONNECTION, "supported_api_formats", ())]
    found = next((name for name in (_PREFERRED.get(agent), *_APIS) if name in formats), None)
    if found is None:
        speaks = ", ".join(formats) or "no API that Harbor names"
        raise ConfigError.of("agent", agent, f"an agent with one of {', '.join(_APIS)}; this one has {speaks}")
    return found


def secrets_of(environment: Mapping[str, str], allowed: tuple[str, ...] = ()) -> dict[str, str]:
    """Values of variables that look like secrets by their name, with the name."""
    return {
        value: name
        for name, value in environment.items()
        if name not in allowed and _SECRET.search(name) and _can_be_found(value)
    }


def weak_secrets_of(environment: Mapping[str, str], allowed: tuple[str, ...] = ()) -> list[str]:
    """Names of variables that look like secrets, whose values are too weak to be searched for in files."""
    return [
        name
        for name, value in environment.items()
        if name not in allowed and _SECRET.search(name) and value and not _can_be_found(value)
    ]


def _can_be_found(secret: str) -> bool:
    """Whether a file that contains the text contains it as this secret: a word or a short number occurs anywhere."""
    return len(secret) >= _SURE_SECRET or (
        len(secret) >= _LEAST_SECRET and not secret.isalpha() and not secret.isdecimal()
    )


def check_variables(task: HarborTask, allowed: tuple[str, ...]) -> None:
    """Raise if a ``${VAR}`` of a task would read a variable of this process that the user has not named.

    Raises:
        ConfigError: it names the field and the variable.
    """
    for where, env in _tables(task.config):
        for name, value in env.items():
            found = _TEMPLATE.fullmatch(value)
            if found is None or found[1] in allowed or (found[2] is not None and found[1] not in os.environ):
                continue
            raise ConfigError.of(f"{task.name}: {where}.{name}", value, f"{found[1]} in variables")


def _tables(config: TaskConfig) -> list[tuple[str, Mapping[str, str]]]:
    tables: list[tuple[str, Mapping[str, str]]] = [
        ("environment.env", config.environment.env),
        ("solution.env", config.solution.env),
    ]
    for where, verifier in (
        ("verifier", config.verifier),
        *((f"steps.{step.name}.verifier", step.verifier) for step in config.steps or ()),
    ):
        tables.append((f"{where}.env", verifier.env))
        if verifier.environment is not None:
            tables.append((f"{where}.environment.env", verifier.environment.env))
    return tables


@attrs.frozen
class HarborAgent:
    """An agent function that plays a Trial; for :func:`~rollouts.programs.function_rollout_to_samples`."""

    agent: str
    """Its name in Harbor, e.g. ``"claude-code"``."""
    tasks: Mapping[str, HarborTask] = attrs.field(repr=lambda tasks: f"{len(tasks)} tasks")
    """By name, which is ``metadata["harbor"]["task"]`` of the prompt."""
    boxes: BoxOptions = attrs.field(factory=BoxOptions)
    rungs: Mapping[str, Rung] = attrs.field(factory=dict)
    """The rung of each task whose verifier is shared; Harbor's own, ``keep``, for a task that is not named."""
    options: Mapping[str, Any] = attrs.field(factory=dict, converter=dict)
    """Further arguments of the agent's class, as ``--agent-kwarg`` of Harbor."""
    install: bool = False
    """Whether Harbor installs the agent in each box, over the network; by default it is in the image."""
    variables: tuple[str, ...] = ()
    """Names of variables of this process that tasks may read."""
    reward_key: str | None = None
    """The key of the reward that is trained; by default the only one, or ``reward``."""
    checked: bool = False
    """Whether the rungs are those of a check, so that every task of theirs is known to get verdicts."""
    lost: LostVerdicts = attrs.field(factory=LostVerdicts, eq=False, repr=lambda lost: "counted")
    """Counts the verdicts."""

    def __attrs_post_init__(self) -> None:
        api_of(self.agent)
        for name, task in self.tasks.items():
            check_variables(task, self.variables)
            if self.install and (self.boxes.network == "none" or task.config.environment.network_mode != "public"):
                expected = "False in a box without a network: the agent is in the image"
                raise ConfigError.of(f"HarborAgent.install (task {name!r})", True, expected)
            rungs = ("keep", "kill") if task.config.steps else rungs_of(task)  # steps share their box
            if self.rungs.get(name, rungs[-1]) not in rungs:
                raise ConfigError.of(f"HarborAgent.rungs[{name!r}]", self.rungs[name], f"one of {', '.join(rungs)}")

    async def __call__(
        self, server: ModelServer, prompt: Prompt, over: anyio.Event, done: Callable[[], None]
    ) -> dict[str, Any]:
        """Play one Trial.

        Args:
            over: set at a limit of the session.
            done: ends the session; called before the tests, for a task with steps before those of the last.

        Returns:
            The reward; ``verdict`` with all rewards and the rung; ``trial`` with what Harbor recorded.

        Raises:
            NoVerdict: the task has none.
            EnvironmentFailure: a box failed.
            GenerateFailure: the agent failed, or its model.
        """
        from rollouts.programs.gateway.server import shared_gateway  # here: aiohttp is part of an extra

        task = task_of(prompt.metadata, self.tasks)
        with FOLDERS.temporary() as folder:
            async with contextlib.AsyncExitStack() as stack:
                gateway = await stack.enter_async_context(shared_gateway())

                async def listen(place: RunningSandbox) -> None:
                    if place.listener is not None:
                        await stack.enter_async_context(gateway.listening(place.listener))

                result = await self._played(task, server, Path(folder), over, done, listen)
        checked = self.checked and task.name in self.rungs
        try:
            outcome = self._outcome(task, result)
        except EnvironmentFailure as error:
            if isinstance(error, NoVerdict):
                self.lost.note(task.name, error.reason, checked=checked)
            elif any(each.agent_execution for each in (result, *(result.step_results or ()))):
                self.lost.note(task.name, "died", checked=checked)
            raise
        self.lost.note(task.name, None, checked=checked)
        return outcome

    async def _played(
        self,
        task: HarborTask,
        server: ModelServer,
        folder: Path,
        over: anyio.Event,
        done: Callable[[], None],
        listen: Callable[[RunningSandbox], Awaitable[None]],
    ) -> Any:
        from harbor.trial.hooks import TrialEvent
        from harbor.trial.trial import Trial

        trial: Any = await Trial.create(self._config(task, server, folder))
        environment = trial.agent_environment
        environment.on_open = listen
        environment.secrets = secrets_of(os.environ, self.variables)
        for name in set(weak_secrets_of(os.environ, self.variables)) - WARNED:
            WARNED.add(name)
            _LOG.warning("%s: %s", name, _WEAK)
        environment.sources = (task.folder, folder, *_paths_in(self.options))
        environment.carried = tuple(artifact.source for artifact in task.config.artifacts)
        ended = anyio.Event()
        if not self.install and hasattr(trial.agent, "install"):
            trial.agent.install = _nothing
        for name in ("run", "resume", "load"):
            if hasattr(trial.agent, name):
                setattr(trial.agent, name, _until(getattr(trial.agent, name), ended))
        rung, left = self._rung(task), len(task.config.steps or ()) or 1

        async def before_tests(event: Any) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                done()
            if rung == "separate":
                return
            try:
                await environment.enter_rung(rung)
            except (SandboxError, OSError) as error:
                raise RungError(str(error)) from error

        trial.add_hook(TrialEvent.VERIFICATION_START, before_tests)

        async def watch() -> None:
            try:
                await over.wait()
                ended.set()
                await anyio.sleep_forever()
            finally:
                with anyio.CancelScope(shield=True):
                    ended.set()
                    await environment.abort()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            # A Trial that is cancelled is not waited for to its end (each await of its cleaning up would be cancelled
            # again), so that it would leave a box. It is ended by closing its box, and waited for.
            with anyio.CancelScope(shield=True):
                result = await trial.run()
            tasks.cancel_scope.cancel()
        return result

    def _rung(self, task: HarborTask) -> Rung:
        """That of the task, by default Harbor's."""
        return self.rungs.get(task.name, "keep" if task.config.steps else rungs_of(task)[-1])

    def _config(self, task: HarborTask, server: ModelServer, folder: Path) -> Any:
        from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TrialConfig
        from harbor.models.trial.config import TaskConfig as TaskPath

        agent: dict[str, Any] = {"name": self.agent, "kwargs": dict(self.options)}
        api = api_of(self.agent)
        if api is not None:
            provider, suffix = _route(self.agent, api)
            host = urlsplit(server.base_url)
            open_box = self.boxes.network == "task" and task.config.environment.network_mode == "public"
            inside = self.agent not in _ON_THIS_MACHINE and not open_box
            origin = f"http://127.0.0.1:{GATEWAY_PORT}" if inside else f"{host.scheme}://{host.netloc}"
            agent |= {
                "model_name": f"{provider}/{server.model.rstrip('/').rpartition('/')[2]}",
                "base_url": f"{origin}{host.path}{suffix}",
                "model_api_format": api,
                "env": dict.fromkeys(_key_names(self.agent, provider), server.api_key),
            }
        boxes = attrs.asdict(self.boxes)
        lists = {name: list(boxes[name]) for name in ("ignore", "layers")}
        return TrialConfig(
            task=TaskPath(path=task.folder),
            trials_dir=folder,
            agent=AgentConfig(**agent),
            environment=EnvironmentConfig(import_path=ENVIRONMENT, kwargs={**boxes, **lists}),
        )

    def _outcome(self, task: HarborTask, result: Any) -> dict[str, Any]:
        """The reward and the record of a Trial."""
        rung = self._rung(task)
        cause = None if result.failure_cause is None else str(result.failure_cause.value)
        if not result.reward_valid:
            raise self._failure(task, result, cause, rung)
        rewards = {name: float(value) for name, value in result.verifier_result.rewards.items()}
        reward = reward_in(rewards, self.reward_key)
        if reward is None:
            raise no_verdict("no_reward", task.name, rung, f"{sorted(rewards)}")
        tokens = result.compute_token_cost_totals()
        return {
            "reward": reward,
            "verdict": {"rewards": rewards, "rung": rung},
            "trial": {
                "agent": self.agent,
                "failure_cause": cause,
                "input_tokens": tokens[0],
                "output_tokens": tokens[2],
            },
        }

    def _failure(self, task: HarborTask, result: Any, cause: str | None, rung: str) -> RolloutsError:
        """The typed failure of a Trial whose reward does not count."""
        errors = [
            each
            for each in (result.exception_info, *(step.exception_info for step in result.step_results or ()))
            if each
        ]
        kind = errors[0].exception_type if errors else "no reward"
        text = f"{kind}: {errors[0].exception_message}" if errors else kind
        if kind == "ConfigError":
            return GenerateFailure(f"Harbor's agent {self.agent} on task {task.name}: {text}")
        if kind == "SandboxError" and any(each.verifier for each in (result, *(result.step_results or ()))):
            return no_verdict("box", task.name, rung, shortened(text))
        if cause in ("sandbox_failed", "harbor_failed", "cancelled") or kind == "SandboxError":
            return EnvironmentFailure(f"Harbor's Trial of task {task.name} ({cause}): {text}")
        if cause in (None, "verifier_failed") or kind == "RungError":
            return no_verdict(_REASONS.get(kind, "missing"), task.name, rung, shortened(text))
        return GenerateFailure(f"Harbor's agent {self.agent} on task {task.name} ({cause}): {text}")


def _route(agent: str, api: str) -> tuple[str, str]:
    """Harbor's provider for an API, and the end of the base URL as the agent's client wants it."""
    from harbor.agents.factory import AgentFactory
    from harbor.models.agent.name import AgentName
    from harbor.models.model_api_format import ModelApiFormat

    provider, suffix = _APIS[api]
    spec: Any = AgentFactory.get_agent_class(AgentName(agent)).MODEL_CONNECTION
    default = spec.default_base_url(provider, ModelApiFormat(api))
    if default is None:
        return provider, suffix
    return provider, "/v1" if default.rstrip("/").endswith("/v1") else ""


def _key_names(agent: str, provider: str) -> list[str]:
    """All variables in which Harbor looks for the key of the model."""
    from harbor.agents.agent_auth_resolution import PROVIDERS
    from harbor.agents.factory import AgentFactory
    from harbor.models.agent.name import AgentName

    spec: Any = AgentFactory.get_agent_class(AgentName(agent)).MODEL_CONNECTION
    of_agent = spec.agent_provider_access.api_key_candidate_names
    return list(dict.fromkeys([*PROVIDERS[provider].api_key_candidate_names, *of_agent]))


def _paths_in(value: Any) -> list[Path]:
    """The files and folders of this machine that the options of an agent name."""
    if isinstance(value, Mapping | list | tuple):
        return [path for each in (value.values() if isinstance(value, Mapping) else value) for path in _paths_in(each)]
    path = Path(value).expanduser() if isinstance(value, str | Path) and "\0" not in str(value) else None
    return [path] if path is not None and path.is_absolute() and path.exists() else []


def _until(run: Callable[..., Awaitable[Any]], ended: anyio.Event) -> Callable[..., Awaitable[Any]]:
    """A method of an agent that returns when the event is set; an error behind it is that of its end."""

    async def play(*args: Any, **options: Any) -> Any:
        returned: Any = None
        try:
            async with first_error() as tasks:
                tasks.start_soon(_cancel_at, ended, tasks.cancel_scope)
                returned = await run(*args, **options)
                tasks.cancel_scope.cancel()
        except Exception:
            if not ended.is_set():
                raise
        return returned

    return play


async def _nothing(environment: Any) -> None:
    """The installation of an agent that the image has."""


async def _cancel_at(event: anyio.Event, scope: anyio.CancelScope) -> None:
    await event.wait()
    scope.cancel()
