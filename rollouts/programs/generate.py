"""Generation of samples by a program, or by an async function of yours, that calls the model through the gateway.

Invariant: one rollout for each prompt, in order: one sample for each of its branches, all with its ``rollout_id``. The
exit code, the output and the limits of the program are data. A failure of its sandbox, an exception of a
function, or an end without a reply costs that rollout, a sample with status FAILED, and no other.

All rollouts of an event loop share one gateway on loopback, or at a public address for programs on other machines; a
sandbox with a separate network has its own listener.
A session is as long as its program: at a limit of the session the program is killed, and its calls so far are kept.

This module does not know groups, reward functions or batches.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Required, TypeAlias, TypeGuard, Unpack, get_args

import anyio
import attrs

from rollouts.agent.turn_log import Turn
from rollouts.base.extras import install_command
from rollouts.base.validators import finite
from rollouts.concurrency.boundary import boundary, call_foreign, function_name
from rollouts.concurrency.deadlines import deadline
from rollouts.concurrency.task_groups import first_error
from rollouts.dtypes import Endpoint, Message, OnRewrite, Prompt, SamplingParams, StopReason
from rollouts.dtypes.lazy_numpy import np
from rollouts.errors import (
    ConfigError,
    EnvironmentFailure,
    Failure,
    GenerateFailure,
    NoReply,
    RolloutsError,
    shortened,
)
from rollouts.inference.base import Policy, describe_once
from rollouts.inference.shared import shared_policy
from rollouts.programs.gateway.address import PublicAddress
from rollouts.programs.gateway.session import ProgramSession, SessionLimits
from rollouts.programs.gateway.tree import Training
from rollouts.programs.launchers.base import ModelServer, Program
from rollouts.programs.launchers.workspace import Workspace
from rollouts.renderer import Renderer, RendererOptions, with_prompt_options
from rollouts.sandboxes import Exit, RunningSandbox, Sandbox, opened
from rollouts.training.agent_integration import generate_all, loaded_renderer, resuming
from rollouts.training.sample_validator import copied
from rollouts.training.samples import trajectory_to_samples
from rollouts.training.types import Sample, Status

if TYPE_CHECKING:
    from rollouts.programs.gateway.server import Gateway

__all__ = [
    "AgentFunction",
    "SandboxChoice",
    "SessionOptions",
    "check_program",
    "chosen_kind",
    "function_rollout_to_samples",
    "generate_function_batch",
    "generate_program_batch",
    "program_rollout_to_samples",
    "task_of",
]

AgentFunction: TypeAlias = Callable[..., Awaitable[Any]]
"""``async def agent(client, prompt)`` or ``async def agent(server, prompt)``, also with further parameters ``over`` and
``done``; see :func:`function_rollout_to_samples`."""

SandboxChoice: TypeAlias = Sandbox | Callable[[Prompt], Sandbox | Awaitable[Sandbox]]
"""One kind of sandbox for all prompts, or a function that chooses the kind of a prompt, sync or async."""

_CHECKED_PROMPTS, _CHECKED_KINDS = 64, 4
"""Prompts whose kinds are chosen before a run, and how many different kinds of theirs are opened."""
_OPEN_SECONDS = 300.0
"""Deadline of opening a sandbox: an image may be loaded."""
_CHOOSE_SECONDS = 1800.0
"""Deadline of a function that chooses a kind: it may build an image."""
_LONGEST_SECONDS = 1e6
"""Deadline of the sandbox for a program; the deadline of the session is earlier."""
_TAIL = 4000
"""Characters of each output of a program that are kept."""
_SHOWN = 400
"""Characters of its error output in a failure."""
_ENDS_OF_PROGRAMS = (StopReason.TASK_COMPLETED, StopReason.CONTEXT_OVERFLOW)
"""Why a session is over that has met no limit and no failure."""


class SessionOptions(RendererOptions, total=False):
    """The options of :func:`program_rollout_to_samples` and :func:`function_rollout_to_samples`.

    Those of the renderer are as for :func:`agent_rollout_to_samples`.
    """

    endpoint: Required[Endpoint]
    """The inference server and its options."""
    tokenizer: Required[Any]
    """A transformers tokenizer, the name or folder of one, or a :class:`Renderer`."""
    limits: SessionLimits | None
    """Limits of the session; the program is killed at the first that is reached. ``max_seconds`` does not run while
    deadlines are paused."""
    sampling: SamplingParams | None
    """Replaces ``endpoint.sampling``; the parameters of the program are not used."""
    policy: Policy | None
    """Replaces the client of ``endpoint``, which all rollouts of one event loop share."""
    training: Training | None
    """Which replies are trained where the program has several conversations."""
    history: OnRewrite
    """The treatment of a reply that the program changed and sends back, by default ``"append"``; see
    :class:`~rollouts.programs.gateway.session.ProgramSession`."""
    context_window: int | None
    """Tokens of prompt and reply; by default the context of the server."""


async def program_rollout_to_samples(
    prompt: Prompt | str | Sequence[Message | dict[str, Any]],
    *,
    program: Program,
    sandbox: SandboxChoice,
    gateway: PublicAddress | None = None,
    workspace: Workspace | None = None,
    **options: Unpack[SessionOptions],
) -> list[Sample]:
    """Run one program in a fresh sandbox, and return the tokens that the model saw and sampled for it as samples.

    Args:
        prompt: text, messages, or a :class:`Prompt` with label and metadata. The text of its messages is the task of
            the program. ``metadata["template_kwargs"]`` overrides variables of the chat template for this prompt.
        program: from task and model server to a command, e.g. ``rollouts.programs.claude_code``, or
            ``functools.partial(script, path=…)``.
        sandbox: the kind of sandbox, opened once for this rollout, or a function that returns the kind for a prompt,
            e.g. with the image of its task.
        gateway: where the gateway listens, and the URL at which a program that does not reach this machine's loopback
            reaches it, e.g. in a container with a bridge.
        workspace: fills the workspace before the program starts, and takes metadata out of it afterwards.
        **options: see :class:`SessionOptions`; ``endpoint`` and ``tokenizer`` are required.

    Returns:
        The rollout's branches as samples. The last one has the rollout's counts in ``metrics``, what ``workspace`` took
        in ``metadata``, and the end of the program in ``metadata["program"]``: ``exit_code``, ``seconds``, ``stdout``,
        ``stderr`` (their ends), ``truncated``. An exit code is not a failure. The reward is ``None``. A failed rollout
        has status FAILED and a ``failure``.

    Raises:
        ConfigError: the tokenizer, template, dialect, program or prompt is invalid, aiohttp is not installed, or this
            machine cannot listen on the address.
        EndpointError: the server does not describe itself, or no server answers for too long.
    """
    prompt = prompt if isinstance(prompt, Prompt) else Prompt(prompt)
    task = task_of(prompt)
    _check_address(gateway)
    rollout = await _begin(prompt, **options)
    session, name, given = rollout.session, function_name(program), _given(prompt)

    async def play(server: Gateway) -> dict[str, Any]:
        async with contextlib.AsyncExitStack() as stack:
            chosen = await chosen_kind(sandbox, given)
            kind = type(chosen).__name__
            with boundary(EnvironmentFailure, f"{kind}.open", seconds=_OPEN_SECONDS):
                place = await stack.enter_async_context(opened(chosen, lambda _: session.count("close_failures")))
            filled = None
            if workspace is not None:
                with boundary(EnvironmentFailure, f"{type(workspace).__name__}.fill"):
                    filled = await workspace.fill(given, place)
            with boundary(EnvironmentFailure, f"the listener of {kind}", kind="environment_start"):
                base_url = await stack.enter_async_context(_reachable(server, session, place, gateway))
            model = rollout.server(base_url, place.home)
            with boundary(GenerateFailure, f"program {name}"):
                launch = program(task, model)
            with boundary(EnvironmentFailure, f"program {name}", kind="environment_step", shown="the program"):
                for path, data in launch.files.items():
                    await place.write(path, data)
                end = await place.run(launch.argv, launch.env, seconds=_LONGEST_SECONDS, stop=session.over)
            server.close(session)
            _end(session, f"the program ended with exit code {end.code}: {end.stderr.strip()[-_SHOWN:]}")
            session.count("program_seconds", end.seconds)
            session.count("program_failed", end.code != 0)
            record: dict[str, Any] = {"program": _record(name, end)}
            if workspace is not None:
                what = f"{type(workspace).__name__}.take"
                with boundary(EnvironmentFailure, what, kind="environment_step"):
                    record |= _returned(dict(await workspace.take(given, place, filled)), what, EnvironmentFailure)
        return record

    return await _samples(prompt, rollout, play, gateway)


async def function_rollout_to_samples(
    prompt: Prompt | str | Sequence[Message | dict[str, Any]],
    *,
    function: AgentFunction,
    **options: Unpack[SessionOptions],
) -> list[Sample]:
    """Run one async function in this process, and return the tokens that the model saw and sampled for it as samples.

    Args:
        prompt: as for :func:`program_rollout_to_samples`.
        function: called with a client or a server, and the :class:`Prompt`. If its first parameter is named ``client``,
            it is an ``openai.AsyncOpenAI``; else a :class:`~rollouts.programs.ModelServer` with ``openai_url``,
            ``base_url`` (Anthropic), ``api_key`` and ``model``. It returns the reward, or a dict of metadata of which
            ``"reward"`` is the reward, or ``None``. It is cancelled at a limit of the session; with a third parameter
            named ``over`` it gets an ``anyio.Event`` instead, which is set at the limit, and must return soon after it.
            A fourth parameter named ``done`` is a function that ends the session before the agent function returns,
            e.g. before it grades the work: later calls of the model are refused, and no limit applies.
        **options: see :class:`SessionOptions`; ``endpoint`` and ``tokenizer`` are required.

    Returns:
        The rollout's branches as samples. An exception of the function is the ``failure`` of the rollout.

    Raises:
        ConfigError: as :func:`program_rollout_to_samples`; or the function is not async, or asks for a client, and
            ``openai`` is not installed.
        EndpointError: the server does not describe itself, or no server answers for too long.
    """
    prompt = prompt if isinstance(prompt, Prompt) else Prompt(prompt)
    name = function_name(function)
    wants_client, wants_over, wants_done = _wants_client(function), _wants_over(function), _wants_done(function)
    rollout = await _begin(prompt, **options)
    session, given = rollout.session, _given(prompt)

    async def play(gateway: Gateway) -> dict[str, Any]:
        server = rollout.server(gateway.open(session), "/")

        def done() -> None:
            gateway.close(session)
            _end(session, f"agent {name} returned")

        async with contextlib.AsyncExitStack() as stack:
            first: Any = await stack.enter_async_context(_openai_client(server)) if wants_client else server
            returned: Any = None
            async with first_error() as tasks:
                if wants_over:
                    arguments: tuple[Any, ...] = (first, given, session.over, *([done] if wants_done else []))
                else:
                    tasks.start_soon(_cancel_at, session.over, tasks.cancel_scope)
                    arguments = (first, given)
                returned = await call_foreign(GenerateFailure, f"agent {name}", function, *arguments)
                tasks.cancel_scope.cancel()
        gateway.close(session)
        record = _returned(returned, f"agent {name}", GenerateFailure)
        done()
        return record

    return await _samples(prompt, rollout, play)


async def generate_program_batch(
    prompts: Iterable[Prompt | str | Sequence[Message | dict[str, Any]]], **options: Any
) -> list[Sample]:
    """Run :func:`program_rollout_to_samples` with ``options`` for all prompts concurrently.

    With the options bound by ``functools.partial``, it is the ``generate_fn`` of a ``RolloutConfig``.

    Returns:
        The samples of each prompt, in order; several where a rollout has several branches.
    """
    return await generate_all(program_rollout_to_samples, prompts, options)


async def generate_function_batch(
    prompts: Iterable[Prompt | str | Sequence[Message | dict[str, Any]]], **options: Any
) -> list[Sample]:
    """Run :func:`function_rollout_to_samples` with ``options`` for all prompts; as :func:`generate_program_batch`."""
    return await generate_all(function_rollout_to_samples, prompts, options)


async def check_program(bound: Mapping[str, Any], prompts: Iterable[Prompt]) -> None:
    """Check the options of :func:`generate_program_batch` or :func:`generate_function_batch` before a run.

    Raises:
        ConfigError: aiohttp is not installed, or the program or the function refuses its arguments or a prompt, or this
            machine cannot listen on the ``gateway``.
        EnvironmentFailure: no kind of sandbox is chosen for a prompt, or this machine cannot open it: of the kinds of
            the first prompts, up to four that differ.
    """
    _check_aiohttp()
    prompts = list(prompts)
    function, program, sandbox = (bound.get(name) for name in ("function", "program", "sandbox"))
    if function is not None:
        _wants_client(function)
    if program is not None:
        server = ModelServer("http://127.0.0.1:8080/s/check", "key", "model", 1 << 16, "/home/agent")
        for prompt in prompts:
            program(task_of(prompt), server)
    if sandbox is not None:
        address = bound.get("gateway")
        _check_address(address)
        if address is not None:
            from rollouts.programs.gateway.server import shared_gateway  # here: aiohttp is part of an extra

            async with shared_gateway(address):
                pass
        for kind in await _kinds_of(sandbox, prompts):
            name = f"{type(kind).__name__}.open"
            with boundary(EnvironmentFailure, name, seconds=_OPEN_SECONDS, before_work=True):
                async with opened(kind) as place:
                    _check_listener(place, address)


generate_program_batch.check = check_program  # type: ignore[attr-defined]  # the preflight of a recipe calls it
generate_function_batch.check = check_program  # type: ignore[attr-defined]


def _is_kind(sandbox: SandboxChoice) -> TypeGuard[Sandbox]:
    return not isinstance(sandbox, type) and hasattr(sandbox, "open") and hasattr(sandbox, "containment")


async def chosen_kind(sandbox: SandboxChoice, prompt: Prompt) -> Sandbox:
    """The kind of sandbox for a prompt."""
    if _is_kind(sandbox):
        return sandbox
    choose: Any = sandbox
    name = f"sandbox {function_name(choose)}"
    kind: Any = await call_foreign(EnvironmentFailure, name, choose, prompt, seconds=_CHOOSE_SECONDS)
    if not _is_kind(kind):
        raise EnvironmentFailure(f"{name}: got {shortened(kind)}; expected a kind of sandbox")
    return kind


async def _kinds_of(sandbox: SandboxChoice, prompts: Sequence[Prompt]) -> list[Sandbox]:
    """The kinds that differ among those of the first prompts."""
    if _is_kind(sandbox):
        return [sandbox]
    if not callable(sandbox):
        expected = "a kind of sandbox, or a function from a prompt to one"
        raise ConfigError.of("sandbox", sandbox, expected)
    kinds: list[Sandbox] = []
    for prompt in prompts[:_CHECKED_PROMPTS]:
        kind = await chosen_kind(sandbox, prompt)
        if kind not in kinds and len(kinds) < _CHECKED_KINDS:
            kinds.append(kind)
    return kinds


def _check_address(address: PublicAddress | None) -> None:
    if address is not None and not isinstance(address, PublicAddress):
        raise ConfigError.of("gateway", address, "a PublicAddress")


def _check_listener(place: RunningSandbox, address: PublicAddress | None) -> None:
    if address is not None and place.listener is not None:
        raise ConfigError.of("gateway", address, "None: this sandbox reaches only its own listener")


def _check_aiohttp() -> None:
    try:
        import aiohttp  # noqa: F401 - part of an extra
    except ImportError as error:
        raise ConfigError(f"a program needs aiohttp: {install_command('gateway')} ({error})") from error


def task_of(prompt: Prompt) -> str:
    """The text of a prompt, as the argument of a program.

    Raises:
        ConfigError: the prompt has a message that is neither of the system nor of the user, or one with an image.
    """
    for number, message in enumerate(prompt.messages):
        if message.role not in ("system", "user"):
            raise ConfigError.of(f"prompt[{number}].role", message.role, "system or user: a program gets one string")
    return "\n\n".join(message.only_text("the task of a program") for message in prompt.messages)


# -- one rollout ------------------------------------------------------------------------------------------------------


@attrs.frozen(eq=False)
class _Rollout:
    """The session of a rollout, and its renderer."""

    session: ProgramSession
    renderer: Renderer
    model: str
    context_window: int
    max_seconds: float

    def server(self, base_url: str, home: str) -> ModelServer:
        """The gateway, as the program is given it."""
        return ModelServer(base_url, self.session.key, self.model, self.context_window, home)


async def _begin(
    prompt: Prompt,
    *,
    endpoint: Endpoint,
    tokenizer: Any,
    limits: SessionLimits | None = None,
    sampling: SamplingParams | None = None,
    policy: Policy | None = None,
    training: Training | None = None,
    history: OnRewrite = "append",
    context_window: int | None = None,
    **options: Unpack[RendererOptions],
) -> _Rollout:
    """The rollout of a prompt, whose session is not open yet; the arguments are :class:`SessionOptions`."""
    limits = limits or SessionLimits()
    _check_aiohttp()
    if history not in get_args(OnRewrite):
        raise ConfigError.of("history", history, f"one of {get_args(OnRewrite)}")
    renderer = await loaded_renderer(tokenizer, with_prompt_options(options, prompt.metadata))
    client = policy if policy is not None else shared_policy(endpoint, renderer.vocab_size)
    known = (await describe_once(client)).max_context
    if known is None and context_window is None:
        raise ConfigError.of("context_window", None, "a number of tokens: the server does not report its context")
    window = min(size for size in (known, context_window) if size is not None)
    session = ProgramSession(
        resuming(client, renderer.decode, prompt.urgency),
        renderer,
        sampling or endpoint.sampling,
        name=f"{prompt.group_index}/{prompt.index}/{prompt.replacement}",
        max_context=window,
        limits=attrs.evolve(limits, max_seconds=_LONGEST_SECONDS),  # :func:`_serve` has the deadline, which can pause
        training=training,
        history=history,
    )
    return _Rollout(session, renderer, endpoint.model, window, limits.max_seconds)


async def _samples(
    prompt: Prompt,
    rollout: _Rollout,
    play: Callable[[Gateway], Awaitable[dict[str, Any]]],
    address: PublicAddress | None = None,
) -> list[Sample]:
    """Play with the session open; convert what it has to samples."""
    from rollouts.programs.gateway.server import shared_gateway  # here: aiohttp is part of an extra

    session = rollout.session
    await _note_start(prompt, session)
    record: dict[str, Any] = {}
    async with shared_gateway(address) as gateway, first_error() as tasks:
        await tasks.start(_serve, session, rollout.max_seconds)
        try:
            record = await play(gateway)
        except (GenerateFailure, EnvironmentFailure) as error:
            at_limit = session.ended and session.stop_reason not in _ENDS_OF_PROGRAMS
            session.end()
            if not at_limit or isinstance(error, EnvironmentFailure):  # of a function at a limit, the limit counts
                session.stop_reason, session.failure = StopReason.FAILED, Failure.of(error)
        finally:
            gateway.close(session)
            session.end()
    branches = session.branches()
    reward = record.pop("reward", None)
    if not branches:
        return [_without_reply(prompt, session, record)]
    if reward is not None:
        branches[-1].step_rewards.append(reward)
    renderer = rollout.renderer
    image_inputs = None if renderer.images is None else renderer.images.inputs
    samples = trajectory_to_samples(branches, prompt, renderer.decode, image_inputs)
    samples[-1].metadata |= record
    return samples


async def _serve(session: ProgramSession, seconds: float, *, task_status: Any) -> None:
    """Keep a session open until it ends, at most for ``seconds``, in which pauses of the deadlines do not count."""
    with deadline(seconds):
        async with session:
            task_status.started()
            try:
                await session.over.wait()
            except anyio.get_cancelled_exc_class():
                session.end(StopReason.DEADLINE)
                raise


async def _note_start(prompt: Prompt, session: ProgramSession) -> None:
    """Record in the rollout's log that it has begun; count a rollout that begins again in a resumed run."""
    log = None if prompt.turn_log is None else await prompt.turn_log.claim()
    if log is None:
        return
    if log.turns:
        session.count("restarted_at_resume")
    none = np.zeros(0)
    await log.save(Turn(1, none.astype(np.int32), none.astype(np.bool_), none.astype(np.float32), {"program": True}))


def _end(session: ProgramSession, how: str) -> None:
    """End the session of a program that has ended; a call that the server did not answer costs the rollout."""
    if session.denied is not None:
        session.end(StopReason.FAILED, session.denied)
    elif not session.tree.calls and not session.ended:
        counts = "".join(f", {name} {amount:g}" for name, amount in sorted(session.counts.items()) if "/" in name)
        message = (
            f"no call of the model was answered{counts[:200]}; {how}"  # a program makes the names of unknown routes
        )
        session.end(StopReason.FAILED, Failure.of(NoReply(message)))
    else:
        session.end(StopReason.CONTEXT_OVERFLOW if session.overflowed else StopReason.TASK_COMPLETED)


def _without_reply(prompt: Prompt, session: ProgramSession, record: Mapping[str, Any]) -> Sample:
    """The sample of a rollout that has nothing to train."""
    counts = ", ".join(f"{name} {amount:g}" for name, amount in sorted(session.metrics().items()))
    failure = session.failure or Failure.of(NoReply(f"no reply is trained: {session.stop_reason}; {counts}"))
    return Sample(
        prompt=prompt.prompt,
        label=prompt.label,
        group_index=prompt.group_index,
        index=prompt.index,
        rollout_id=prompt.index,
        metadata={**prompt.metadata, **record},
        status=Status.FAILED,
        stop_reason=StopReason.FAILED,
        failure=failure,
        metrics=session.metrics(),
    )


# -- programs ---------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _reachable(
    gateway: Gateway, session: ProgramSession, place: RunningSandbox, address: PublicAddress | None
) -> AsyncIterator[str]:
    """Open the session at the gateway; yields its base URL inside the sandbox."""
    _check_listener(place, address)
    if place.listener is None:
        yield gateway.open(session, place.url_inside(gateway.port) if address is None else address.url)
        return
    async with gateway.listening(place.listener):
        yield gateway.open(session, place.url_inside())


def _record(name: str, end: Exit) -> dict[str, Any]:
    return {
        "name": name,
        "exit_code": end.code,
        "seconds": end.seconds,
        "stdout": end.stdout[-_TAIL:],
        "stderr": end.stderr[-_TAIL:],
        "truncated": end.truncated or max(len(end.stdout), len(end.stderr)) > _TAIL,
    }


# -- functions --------------------------------------------------------------------------------------------------------


def _wants_client(function: AgentFunction) -> bool:
    """Whether the first parameter of an agent function is an OpenAI client.

    Raises:
        ConfigError: the function is not async or does not take two arguments, or ``openai`` is not installed.
    """
    expected = "async def agent(client, prompt), or async def agent(server, prompt); also with over, and done"
    called = function if inspect.isroutine(function) else getattr(function, "func", function)
    if not inspect.iscoroutinefunction(called) and not inspect.iscoroutinefunction(getattr(called, "__call__", None)):  # noqa: B004
        raise ConfigError.of("function", function, expected)
    signature = inspect.signature(function)
    try:
        signature.bind(*[None] * (2 + _wants_over(function) + _wants_done(function)))
    except TypeError:
        raise ConfigError.of("function", f"{function_name(function)}{signature}", expected) from None
    if next(iter(signature.parameters)) != "client":
        return False
    try:
        import openai  # noqa: F401 - a package of the user's
    except ImportError as error:
        text = f"function: {function_name(function)}{signature} takes a client; expected the package openai"
        raise ConfigError(f'{text}: pip install openai, or name the parameter "server" ({error})') from error
    return True


def _wants_over(function: AgentFunction) -> bool:
    """Whether an agent function ends by itself at a limit of its session."""
    return list(inspect.signature(function).parameters)[2:3] == ["over"]


def _wants_done(function: AgentFunction) -> bool:
    """Whether an agent function that ends by itself says when its agent has ended."""
    return list(inspect.signature(function).parameters)[2:4] == ["over", "done"]


@contextlib.asynccontextmanager
async def _openai_client(server: ModelServer) -> AsyncIterator[Any]:
    import openai

    # Without TLS, whose context costs more than the rest of the client: the gateway is on loopback.
    http = openai.DefaultAsyncHttpxClient(verify=False)
    async with openai.AsyncOpenAI(
        base_url=server.openai_url, api_key=server.api_key, http_client=http, timeout=None
    ) as client:
        yield client


async def _cancel_at(event: anyio.Event, scope: anyio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


def _given(prompt: Prompt) -> Prompt:
    """The prompt that foreign code gets: without its log, and with another label, which it may change in place."""
    return attrs.evolve(prompt, label=copied(prompt.label), turn_log=None, urgency=None)


def _returned(value: Any, what: str, failure: type[RolloutsError]) -> dict[str, Any]:
    """The value that an agent function or a workspace returned, as metadata with a ``reward``."""
    given = dict(value) if isinstance(value, Mapping) else {} if value is None else {"reward": value}
    if given.get("reward") is not None:
        given["reward"] = finite(given["reward"])
        if given["reward"] is None:
            raise failure(f"{what}: got {shortened(value)}; expected a number, a dict or None")
    return given
