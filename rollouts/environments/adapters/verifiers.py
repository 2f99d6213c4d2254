"""Tasksets of verifiers 0.4: their tasks, tools and rewards, played by the agent of this package.

Invariant: each rollout has a separate trace, whose nodes are the messages of the conversation, and the task's own
``setup``, ``finalize`` and ``score`` run on it. Tools run in this process. A trace here has no tokens.

Tasks that need verifiers' rollout are refused by name: a container, a user simulator, interceptors and stop conditions,
tools with state, and tools of the whole taskset.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rollouts.dtypes import Message, Prompt, Tool, as_messages
from rollouts.environments.adapters.calls import numbers_of
from rollouts.environments.base import StepResult, bad_step
from rollouts.errors import ConfigError, shortened

__all__ = ["VerifiersEnvironment", "tasks_of"]

INDEX = "verifiers_index"
"""Metadata key of a prompt: the number of its task."""


def tasks_of(tasks: Iterable[Any]) -> tuple[list[Prompt], Callable[[], VerifiersEnvironment]]:
    """The prompts of tasks, and the environment class to play them in.

    Args:
        tasks: a taskset of verifiers, or a view of one such as ``taskset.take(100)``; its tasks are held in memory.

    Raises:
        ConfigError: a task, or the whole taskset, needs verifiers' own rollout; the message names what for.
    """
    shared = getattr(tasks, "toolsets", None)
    if shared is not None and shared(tasks.config):  # type: ignore[attr-defined]
        raise ConfigError.of(
            "taskset.toolsets", type(tasks).__name__, "none: tools of a whole taskset run in verifiers"
        )
    held = list(tasks)
    prompts = [_prompt(task, number) for number, task in enumerate(held)]
    return prompts, lambda: VerifiersEnvironment(held)


def _prompt(task: Any, number: int) -> Prompt:
    from verifiers.v1.utils.decorators import discover_decorated

    name = f"{type(task).__name__} {number}"
    if task.NEEDS_CONTAINER or task.data.image is not None:
        raise ConfigError.of(f"{name}.NEEDS_CONTAINER", True, "a task that needs no container")
    if task.data.prompt is None:
        raise ConfigError.of(f"{name}.prompt", None, "a prompt: a user simulator runs in verifiers")
    needed = [*task.hooks("stop"), *discover_decorated(task, "intercept")]
    if needed:
        raise ConfigError.of(name, [hook.__name__ for hook in needed], "no stop conditions and no interceptors")
    given = task.data.prompt
    chat = given if isinstance(given, str) else [message.model_dump(exclude_none=True) for message in given]
    messages = as_messages(chat)
    if task.data.system_prompt is not None:
        messages = (Message("system", task.data.system_prompt), *messages)
    return Prompt(messages, metadata={INDEX: number})


class VerifiersEnvironment:
    """One episode of a task. :func:`tasks_of` makes the prompts and this class for them.

    A reply without a call ends the episode, and the task's rewards and metrics are computed from the trace so far. A
    rollout that a limit ends is not scored; bind a ``reward_fn`` to score it.

    Args:
        tasks: the tasks; the prompt names one by its number.
    """

    def __init__(self, tasks: Sequence[Any]) -> None:
        self._tasks = tasks
        self._task: Any = None
        self._trace: Any = None
        self._runtime: Any = None
        self._servers: dict[str, tuple[Any, str]] = {}
        self._tools: list[Tool] = []

    @property
    def tools(self) -> Sequence[Tool]:
        return tuple(self._tools)

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        from verifiers.v1.configs.agent import AgentConfig
        from verifiers.v1.runtimes import SubprocessConfig, make_runtime
        from verifiers.v1.state import state_cls
        from verifiers.v1.trace import AgentInfo, Trace, TraceTask

        number = prompt.metadata.get(INDEX)
        if type(number) is not int or not 0 <= number < len(self._tasks):
            raise ConfigError.of(f"metadata[{INDEX!r}]", number, f"the number of a task, of {len(self._tasks)}")
        self._task = task = self._tasks[number]
        record = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        agent = AgentInfo(config=AgentConfig(runtime=SubprocessConfig()))
        self._trace = Trace(task=record, state=state_cls(type(task))(), agent=agent)
        self._runtime = make_runtime(SubprocessConfig(), name=self._trace.id)
        self._runtime.env = dict(task.runtime_env())
        await self._runtime.start()
        await self._run(task.setup)
        for toolset in task.toolsets(task.config):
            await self._serve(toolset)
        for message in prompt.messages:
            self._commit(message)
        return prompt.messages

    async def step(self, reply: Message) -> StepResult:
        self._commit(reply)
        if not reply.tool_calls:
            return await self._score()
        messages, failed = [], 0
        for call in reply.tool_calls:
            server, name = self._servers[call.name]
            try:
                text, error = _text(await server.call_tool(name, dict(call.arguments))), False
            except Exception as raised:  # noqa: BLE001 - an MCP server answers any exception of a tool as an error
                text, error = str(raised), True
            failed += error
            messages.append(Message("tool", text, tool_call_id=call.id, name=call.name))
            self._commit(messages[-1])
        return StepResult(messages, metrics={"tool_errors": failed})

    async def close(self) -> None:
        runtime, self._runtime = self._runtime, None
        if runtime is not None:
            await runtime.stop()

    async def _score(self) -> StepResult:
        self._trace.is_completed = self._trace.ok = True
        await self._run(self._task.finalize)
        await self._task.score(self._trace, self._runtime)
        metrics = numbers_of(self._trace.metrics, "Trace.metrics")
        metrics |= {f"reward/{name}": one.value for name, one in self._trace.rewards.items() if one is not None}
        return StepResult(done=True, reward=self._trace.reward if self._trace.rewards else None, metrics=metrics)

    async def _run(self, hook: Callable[..., Any]) -> None:
        from verifiers.v1.utils.decorators import invoke

        await invoke(hook, {"trace": self._trace, "runtime": self._runtime})

    async def _serve(self, toolset: Any) -> None:
        """Register the tools of a toolset with an MCP server that is called in this process, and never listens."""
        from mcp.server.mcpserver import MCPServer
        from verifiers.v1.state import State, state_cls

        name = toolset.server_name
        if toolset.config.url is not None or state_cls(type(toolset)) is not State:
            expected = "a toolset without url, and without state, which verifiers synchronises"
            raise ConfigError.of("task.toolsets", type(toolset).__name__, expected)
        await toolset.setup()
        await toolset.setup_task(self._task.data)
        server = MCPServer(name or type(toolset).__name__)
        toolset.register(server)
        for tool in await server.list_tools():
            full = f"{name}_{tool.name}" if name else tool.name
            if full in self._servers:
                raise ConfigError.of("task.toolsets", full, "tools with names that differ")
            self._servers[full] = server, tool.name
            self._tools.append(Tool(full, tool.description or "", tool.input_schema))

    def _commit(self, message: Message) -> None:
        """Append a message to the trace: one branch, each node the child of the one before."""
        from verifiers.v1.graph import MessageNode

        nodes = self._trace.nodes
        chat: dict[str, Any] = {"role": message.role, "content": message.only_text("a trace of verifiers")}
        if message.role == "assistant":
            calls = [
                {"id": one.id, "name": one.name, "arguments": json.dumps(dict(one.arguments))}
                for one in message.tool_calls
            ]
            chat |= {"tool_calls": calls or None, "reasoning_content": message.reasoning}
        elif message.role == "tool":
            chat |= {"tool_call_id": message.tool_call_id, "name": message.name}
        sampled = message.role == "assistant"
        nodes.append(MessageNode(parent=len(nodes) - 1 if nodes else None, message=chat, sampled=sampled))


def _text(result: Any) -> str:
    """The text of a tool's result; other content fails the rollout."""
    blocks = result.content
    if not all(block.type == "text" for block in blocks):
        raise bad_step("call_tool", f"got {shortened(blocks)}; expected text")
    return "\n".join(block.text for block in blocks)
