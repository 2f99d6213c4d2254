"""Bad inputs and faults with their messages: the rows of docs/bad_inputs.md, each provoked by its test."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import attrs
import numpy as np

from rollouts.agent import run_agent
from rollouts.commands import main
from rollouts.commands.rehearsal import rehearse
from rollouts.dtypes import Endpoint, Limits, Message, Prompt, SamplingParams, ToolCall
from rollouts.engine import DEMO_MODEL
from rollouts.environments import CalculatorEnvironment, StepResult, ToolEnvironment, tool
from rollouts.environments.ors import ORSServer
from rollouts.environments.python_tool import PythonLimits
from rollouts.errors import ConfigError
from rollouts.inference.base import CompletionRequest
from rollouts.inference.sglang import SGLangPolicy
from rollouts.inference.shared import shared_policy
from rollouts.integrations.ors_server.app import environment_server
from rollouts.recipe import agent_recipe
from rollouts.renderer import renderer_for
from rollouts.rewards import exact_match, numeric_match
from rollouts.runs.journal import Journal, read_journal
from rollouts.runs.reader import load_run
from rollouts.runs.writer import RunWriter
from rollouts.sandboxes.containment import containment_of
from rollouts.testing.policy import ScriptedPolicy
from rollouts.testing.replies import Answer, Fault
from rollouts.testing.server import StubServer
from rollouts.training import AsyncRolloutManager, DataBuffer, RolloutConfig, Sample, check_reward_nonzero_std
from rollouts.training.failures import FailurePolicy
from rollouts.training.prompt_files import load_prompts
from rollouts.training.types import Group
from tests import ors_recipe
from tests.bad_worlds import BAD, Bad, play_with_sound_prompts
from tests.stored_runs import some_sample
from tests.wrong_recipes import DOUBTFUL, WRONG, run_wrong, say_doubts

__all__ = ["ROWS", "Row", "message_of", "page"]

CALCULATOR = str(Path(__file__).parents[1] / "configs" / "calculator.py")


@attrs.frozen
class Row:
    """One line of the table."""

    chapter: str
    what: str
    message: str
    """The start of the message; ``…`` matches anything, ``DIR`` is the folder."""
    provoke: Callable[[Path], Any]
    """Provoke the fault in an empty folder; raise an error with the message, or return the message."""
    needs: str = ""
    """The package that the row needs, or ``""``."""


def message_of(row: Row, folder: Path) -> str:
    """Provoke the fault of a row and return its message."""

    async def awaited(result: Awaitable[Any]) -> Any:
        return await result

    try:
        result = row.provoke(folder)
        text = anyio.run(awaited, result) if isinstance(result, Awaitable) else result
    except Exception as error:  # noqa: BLE001 - the text of any error is compared
        text = str(error)
    return str(text).replace(str(folder), "DIR").replace(CALCULATOR, "calculator.py")


def run_with_sound_prompts(bad: Bad) -> Callable[[Path], Any]:
    """Run a bad world together with sound prompts."""

    async def run(folder: Path) -> Any:
        return (await play_with_sound_prompts(bad, folder)).failures[0].message

    return run


async def wrong_split(folder: Path) -> Any:
    """Request the tasks of a split that the ORS server does not have."""
    async with environment_server(ors_recipe.recipe(Endpoint())) as url:
        server = ORSServer(url)
        try:
            return await server.prompts("dev")
        except ConfigError as error:  # if it left the server block, it would be inside an exception group
            return error
        finally:
            await server.aclose()


# -- how to provoke them ----------------------------------------------------------------------------------------------


def command(*arguments: str) -> Callable[[Path], str]:
    """Run a command line; DIR is the folder."""

    def run(folder: Path) -> str:
        err = io.StringIO()
        streams = contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO())
        with streams[0], streams[1], contextlib.suppress(SystemExit):  # of argparse
            main([argument.replace("DIR", str(folder)) for argument in arguments])
        return err.getvalue().removeprefix("rollouts: error: ").strip()

    return run


def without_a_template(folder: Path) -> str:
    """Check a tokenizer whose folder has no chat template."""
    (folder / "model").mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / "model" / name).write_bytes((DEMO_MODEL / name).read_bytes())
    return command("check", "--model", "DIR/model")(folder)


def a_page_at(path: str) -> Callable[[Path], str]:
    """View a run of one sample, with the page at a path."""

    def run(folder: Path) -> str:
        writer = RunWriter(folder / "run")
        writer.write_batch([some_sample(Prompt("why?", group_index=0, index=0), 0)], {})
        writer.finish("finished")
        return command("view", "DIR/run", "--out", path)(folder).partition("error: ")[2]

    return run


def while_a_run_is_written(*arguments: str) -> Callable[[Path], str]:
    """Run a command line while a run is written to DIR/run."""

    def run(folder: Path) -> str:
        writer = RunWriter(folder / "run")
        writer.write_batch([some_sample(Prompt("why?", group_index=0, index=0), 0)], {})
        message = command(*arguments)(folder)
        writer.finish("finished")
        return message

    return run


class DataFrame:
    """The attributes that mark a pandas table."""

    columns = ("prompt", "label")

    def to_dict(self, orient: str) -> Any:
        return [{"prompt": "a", "label": "b"}]

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)


def table(folder: Path) -> Any:
    """Use a table of pyarrow as prompts."""
    arrow: Any = importlib.import_module("pyarrow")
    return DataBuffer(arrow.table({"prompt": ["a"]}))


def open_file(folder: Path) -> Any:
    """Use an open file as prompts."""
    (folder / "data.jsonl").write_text('{"prompt": "a"}\n')
    with (folder / "data.jsonl").open() as file:
        return DataBuffer(file)


def labelled(reward_fn: Callable[[Sample], Any], label: Any) -> Callable[[Path], Any]:
    """Score a reply whose label is not one."""
    return lambda folder: reward_fn(Sample(messages=[{"role": "assistant", "content": "nan"}], label=label))


def data(text: str) -> Callable[[Path], Any]:
    def run(folder: Path) -> Any:
        (folder / "data.jsonl").write_text(text)
        return load_prompts(folder / "data.jsonl")

    return run


def in_utf16(suffix: str) -> Callable[[Path], Any]:
    """Load a file that an editor saved as UTF-16."""

    def run(folder: Path) -> Any:
        (folder / f"data{suffix}").write_text('{"prompt": "a"}', encoding="utf-16")
        return load_prompts(folder / f"data{suffix}")

    return run


def image(url: str) -> Callable[[Path], Any]:
    """Load a row whose message has an image."""
    part = {"type": "image_url", "image_url": {"url": url}}
    return data(json.dumps({"prompt": [{"role": "user", "content": [part]}]}))


def recipe_file(text: str) -> Callable[[Path], Any]:
    def run(folder: Path) -> Any:
        (folder / "mine.py").write_text(text)
        return command("run", "DIR/mine.py", "--out", "DIR/run")(folder)

    return run


def configured(**fields: Any) -> Callable[[Path], Any]:
    return lambda folder: RolloutConfig(**{"batch_size": 1, "generate_fn": generate, **fields})


async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
    await anyio.lowlevel.checkpoint()
    return [some_sample(prompt, 0) for prompt in prompts]


def batch(**fields: Any) -> Callable[[Path], Any]:
    """Generate a batch of groups of two rollouts; the first failure stops the run."""

    async def run(folder: Path) -> Any:
        fixed = {"batch_size": 1, "n_samples_per_prompt": 2, "max_attempts": 1, "on_failure": "stop"}
        config = RolloutConfig(**{"generate_fn": generate, **fixed, **fields})
        async with AsyncRolloutManager(config, DataBuffer(["question"])) as manager:
            return await manager.generate_batch()

    return run


def world(start: Any = None, step: Any = None, seconds: float = 60.0) -> Callable[[Path], Any]:
    """Run an episode in a calculator with another ``start`` or ``step``."""

    async def run(folder: Path) -> Any:
        methods = {"start": start, "step": step}
        kind = type("World", (CalculatorEnvironment,), {name: value for name, value in methods.items() if value})
        renderer = await anyio.to_thread.run_sync(renderer_for, str(DEMO_MODEL))
        reply = renderer.encode("The answer is 3.<|im_end|>")
        limits = Limits(step_seconds=seconds)
        played = await run_agent(
            Prompt("1 + 2?", index=0), kind, ScriptedPolicy([reply]), renderer, sampling=SamplingParams(), limits=limits
        )
        assert played.failure is not None
        return played.failure.message

    return run


def called(name: str, **arguments: Any) -> Callable[[Path], Any]:
    """Return the tool message that answers a call."""

    async def run(folder: Path) -> Any:
        reply = Message("assistant", tool_calls=(ToolCall(name, arguments, id="1"),))
        return (await CalculatorEnvironment().step(reply)).messages[0].content

    return run


def spoken(text: str) -> Callable[[Path], Any]:
    """Return the tool message that answers a reply with this text."""

    async def run(folder: Path) -> Any:
        renderer = await anyio.to_thread.run_sync(renderer_for, str(DEMO_MODEL))
        policy = ScriptedPolicy([renderer.encode(reply + "<|im_end|>") for reply in (text, "Well.")])
        played = await run_agent(
            Prompt("1 + 2?", index=0), CalculatorEnvironment, policy, renderer, sampling=SamplingParams()
        )
        return next(message.content for message in played.messages if message.role == "tool")

    return run


def asked(fault: Fault | Answer, *, vocab_size: int | None = None, **options: Any) -> Callable[[Path], Any]:
    """Request one completion from a server with a fault."""

    async def run(folder: Path) -> Any:
        async with StubServer(faults=[fault] * 3) as server:
            endpoint = Endpoint(base_url=server.url, max_retries=0, **options)
            policy = SGLangPolicy(endpoint, vocab_size=vocab_size, backoff=lambda failures: 0.0)
            async with policy:
                ids = np.arange(1, 6, dtype=np.int32)
                return await policy.complete(CompletionRequest(ids, SamplingParams(max_new_tokens=16)))

    return run


def described(provider: str, path: str = "") -> Callable[[Path], Any]:
    """Ask a server that has none of the routes for its model."""

    async def run(folder: Path) -> Any:
        async with StubServer(model_info=None) as server:
            return await shared_policy(Endpoint(provider=provider, base_url=server.url + path)).describe()

    return run


def sampled(token: int, logprob: float) -> Answer:
    """A reply of one token."""
    body = b'{"meta_info":{"finish_reason":{"type":"stop"},"output_token_logprobs":[[%g,%d,null]]}}'
    return Answer(200, body % (logprob, token))


def damaged(change: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Write a journal of several segments, change it, and read it."""

    def run(folder: Path) -> Any:
        with Journal(folder / "journal", segment_bytes=100) as journal:
            for number in range(3):
                journal.append("turn", {"number": number, "text": "x" * 100})
                journal.flush()
        change(folder / "journal")
        return len(list(read_journal(folder / "journal")))

    return run


def flip(path: Path) -> None:
    data = bytearray((path / "segment-000000.journal").read_bytes())
    data[-3] ^= 4
    (path / "segment-000000.journal").write_bytes(data)


def stored(text: bytes, replacement: bytes) -> Callable[[Path], Any]:
    """Write a run with one dropped group, change it, and read it."""

    def run(folder: Path) -> Any:
        prompt = Prompt("question", group_index=0, index=0)
        writer = RunWriter(folder / "run")
        writer.on_group(Group(prompt, (some_sample(prompt, 0),), "dropped", "why"))
        writer.finish("finished")
        path = folder / "run" / "dropped.jsonl"
        path.write_bytes(path.read_bytes().replace(text, replacement, 1))
        return list(load_run(folder / "run", "dropped"))

    return run


def twice(folder: Path) -> None:
    with Journal(folder / "journal"):
        Journal(folder / "journal")


async def raises(*arguments: Any) -> Any:
    raise ConnectionError("the world is down")


async def hangs(*arguments: Any) -> Any:
    await anyio.sleep_forever()


async def nothing(*arguments: Any) -> StepResult:
    return StepResult()


async def two_ways(*arguments: Any) -> StepResult:
    return StepResult([Message("user", "Go on.")], continuation=" and")


async def unpaid(*arguments: Any) -> StepResult:
    return StepResult(done=True, reward=float("nan"))


async def uncounted(*arguments: Any) -> StepResult:
    return StepResult(done=True, metrics={"found": "yes"})  # type: ignore[dict-item]


def tool_result(value: Any) -> Callable[[Path], Any]:
    """Run an episode whose tool returns this value; return the failure, or the message that the model reads."""

    async def run(folder: Path) -> Any:
        class Shop(ToolEnvironment):
            @tool
            def look(self) -> Any:
                """Look around."""
                return value

        renderer = await anyio.to_thread.run_sync(renderer_for, str(DEMO_MODEL))
        call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
        policy = ScriptedPolicy([renderer.encode(reply + "<|im_end|>") for reply in (call, "Well.")])
        played = await run_agent(Prompt("What?", index=0), Shop, policy, renderer, sampling=SamplingParams())
        if played.failure is not None:
            return played.failure.message
        return next(message.content for message in played.messages if message.role == "tool")

    return run


def hiding_tools(folder: Path) -> Any:
    """Define a class whose list of tools hides the methods that are marked."""
    type("Shop", (CalculatorEnvironment,), {"tools": []})


def rehearsed(**fields: Any) -> Callable[[Path], Any]:
    """Rehearse a recipe of the calculator."""

    async def run(folder: Path) -> Any:
        endpoint = Endpoint(base_url="http://127.0.0.1:9", model=str(DEMO_MODEL))
        return await rehearse(agent_recipe("toy", endpoint, CalculatorEnvironment, ["1 + 2?"], **fields))

    return run


async def a_text(*arguments: Any) -> Any:
    return "hello"


def of_two(sample: Sample, label: str) -> float:
    return 0.0


def one_for_all(samples: Sequence[Sample]) -> list[float]:
    return [1.0]


def changes_place(sample: Sample) -> float:
    sample.group_index = 7
    return 1.0


def stores_itself(sample: Sample) -> float:
    sample.metadata["again"] = sample.metadata
    return 1.0


def drops_all(samples: Sequence[Sample]) -> bool:
    return False


def never(samples: Sequence[Sample]) -> Any:
    return "yes"


def broken(sample: Sample) -> float:
    raise KeyError("label")


def not_a_number(sample: Sample) -> float:
    return float("nan")


async def empty(prompts: Sequence[Prompt]) -> list[Sample]:
    return []


LINE, CONFIG, DATA = "The command line", "Recipes and configs", "Data"
WRONG_RECIPES = "Recipes, refused before their first token"
DOUBTFUL_RECIPES = "Recipes that are legal, with a warning before their first token"
SERVED = "Environments and judges behind a server, of one prompt among sound ones"
FOREIGN, SERVER, CALLS, DISK = "Environments, rewards and filters", "Servers", "What a model reads", "What is on disk"
RUN = ("run", CALCULATOR, "--out", "DIR/run")

# One line for each row of the table.
# ruff: noqa: E501
# fmt: off
ROWS = [
    Row(LINE, "no such recipe", "RECIPE: got '…none.py'; expected an existing Python file with a function recipe(endpoint, *, ...), or a known recipe: calculator, …", command("run", "none.py", "--out", "DIR/run")),
    Row(LINE, "an option that the recipe does not have", "--set: got 'size'; expected an option of the recipe: max_turns (int), …", command(*RUN, "--set", "size=3")),
    Row(LINE, "an option with a misspelled name", "--set: got 'batch_sise'; expected an option of the recipe (did you mean batch_size…?): max_turns (int), …", command(*RUN, "--set", "batch_sise=3")),
    Row(LINE, "a recipe with a misspelled name", "RECIPE: got 'calclator'; expected an existing Python file with a function recipe(endpoint, *, ...), or a known recipe (did you mean calculator?): calculator, …", command("run", "calclator", "--out", "DIR/run")),
    Row(LINE, "an option of another type", "--set batch_size: got 'x'; expected int (…)", command(*RUN, "--set", "batch_size=x")),
    Row(LINE, "an option without a value", "--set: got 'batch_size'; expected key=value", command(*RUN, "--set", "batch_size")),
    Row(LINE, "no such model", "--model: got '…none'; expected a folder with a model, or --endpoint URL of a server that has it", command(*RUN, "--model", "none")),
    Row(LINE, "no such tokenizer", "tokenizer: got 'DIR/none'; expected a folder with tokenizer.json and tokenizer_config.json, or a model name on the Hugging Face Hub", command("check", "--model", "DIR/none")),
    Row(LINE, "a tokenizer without a chat template", "chat_template: got None; expected template text or a function (--chat-template): the tokenizer 'DIR/model' has no chat template", without_a_template),
    Row(LINE, "a folder that cannot be written to", "--out: got '/proc/run'; expected a folder that can be written to ([Errno 2] …)", command("run", CALCULATOR, "--out", "/proc/run")),
    Row(LINE, "a port that does not exist", "… serve: error: argument --port: got 99999; expected a port, 0 to 65535; see …", command("serve", "--port", "99999")),
    Row(LINE, "an argument that is missing", "… show: error: the following arguments are required: RUN; see …", command("show")),
    Row(LINE, "OpenAI's API without a key", "--api-key-env: got 'OPENAI_API_KEY'; expected an environment variable that is set", command("eval", CALCULATOR, "--provider", "openai", "--model", "m", "--out", "DIR/run")),
    Row(LINE, "a page where it cannot be written", "--out: got '/proc/x.html'; expected a file that can be written ([Errno 2] …)", a_page_at("/proc/x.html")),
    Row(LINE, "not a URL", "Endpoint.base_url: got ('host:1',); expected one or more URLs that start with http:// or https://", command(*RUN, "--endpoint", "host:1")),
    Row(LINE, "no server at the URL", "no server answers at http://127.0.0.1:9: …. Start the server, or correct Endpoint.base_url", command(*RUN, "--endpoint", "http://127.0.0.1:9")),
    Row(LINE, "no such run", "RUN: got 'DIR/none'; expected the folder of a run, with run.json", command("show", "DIR/none")),
    Row(LINE, "a run in the place of one that is being written", "--out: got 'DIR/run'; expected a run that no other process is writing to", while_a_run_is_written("run", CALCULATOR, "--out", "DIR/run", "--overwrite")),
    Row(LINE, "an export among the files of a run", "OUT: got 'DIR/run/failed.jsonl'; expected a place outside the files of the run in 'DIR/run'", while_a_run_is_written("export", "DIR/run", "--to", "jsonl", "DIR/run/failed.jsonl")),
    Row(CONFIG, "a recipe file that does not import", "DIR/mine.py, line 2: importing the recipe raised ZeroDivisionError: division by zero", recipe_file("x = 0\nx = 1 / x\n")),
    Row(CONFIG, "a recipe file without a recipe", "DIR/mine.py: recipe: got None; expected a function recipe(endpoint, *, ...) that returns a Recipe", recipe_file("x = 0\n")),
    Row(CONFIG, "a batch of nothing", "RolloutConfig.batch_size: got 0; expected an integer >= 1", configured(batch_size=0)),
    Row(CONFIG, "over-sampling below one", "RolloutConfig.over_sampling_factor: got 0.5; expected a number >= 1", configured(over_sampling_factor=0.5)),
    Row(CONFIG, "no slot for a rollout", "RolloutConfig.in_flight: got 0; expected an integer >= 1", configured(in_flight=0)),
    Row(CONFIG, "a filter for spread over one rollout", "RolloutConfig.n_samples_per_prompt: got 1; expected at least 2 with filter_fn=check_reward_nonzero_std", configured(n_samples_per_prompt=1, filter_fn=check_reward_nonzero_std)),
    Row(CONFIG, "a cause of failure that does not exist", "RolloutConfig.failures: got 'oom'; expected one of endpoint, environment_start, environment_step, verifier, reward, filter, generate, deadline", configured(failures={"oom": FailurePolicy()})),
    Row(CONFIG, "a temperature below zero", "SamplingParams.temperature: got -1; expected a number >= 0", lambda folder: SamplingParams(temperature=-1)),
    Row(CONFIG, "no turns", "Limits.max_turns: got 0; expected an integer >= 1", lambda folder: Limits(max_turns=0)),
    Row(CONFIG, "a key and a password in the URL", "Endpoint.api_key: got '(not shown)'; expected none where a URL has a user name or a password", lambda folder: Endpoint(base_url="http://me:pw@host:1", api_key="k")),
    Row(CONFIG, "limits of untrusted Python", "PythonLimits.seconds: got 0; expected a number > 0", lambda folder: PythonLimits(seconds=0)),
    Row(CONFIG, "a sandbox that cannot hold what is required", "require: got 'network'; this machine does not enforce network (no namespaces here (unshare: Operation not permitted) and no system call filter); expected one that does, or pass require=[] to run without", lambda folder: containment_of(["landlock"], "unshare: Operation not permitted", "linux").check("network")),
    *(Row(WRONG_RECIPES, wrong.what, wrong.message, functools.partial(run_wrong, wrong)) for wrong in WRONG),
    *(Row(DOUBTFUL_RECIPES, wrong.what, wrong.message, functools.partial(say_doubts, wrong)) for wrong in DOUBTFUL),
    Row(DATA, "no such file", "data: got 'DIR/none.jsonl'; expected a .jsonl, .json, .csv or .parquet file, a folder of them or of save_to_disk() of datasets, or hub:OWNER/DATASET/PATH", lambda folder: load_prompts(folder / "none.jsonl")),
    Row(DATA, "an empty file", "data: got 'DIR/data.jsonl'; expected at least one row", data("\n\n")),
    Row(DATA, "a line that is not JSON", "DIR/data.jsonl, line 2: not JSON (…)", data('{"prompt": "a"}\n{"prompt": \n')),
    Row(DATA, "half of a pair of UTF-16", "DIR/data.jsonl, line 1: a string has half of a surrogate pair (…); expected Unicode text, as json.dumps writes it from text without lone surrogates", data('{"prompt": "a \\ud83d b"}\n')),
    Row(DATA, "a file in UTF-16", "DIR/data.jsonl, line 1: got UTF-16; expected UTF-8: save the file with that encoding", in_utf16(".jsonl")),
    Row(DATA, "a table in UTF-16", "DIR/data.csv, line 1: got UTF-16; expected UTF-8: save the file with that encoding", in_utf16(".csv")),
    Row(DATA, "an array in UTF-16", "DIR/data.json, line 1: got UTF-16; expected UTF-8: save the file with that encoding", in_utf16(".json")),
    Row(DATA, "JSON of another shape", "DIR/data.jsonl, line 1: got [1]; expected an object with \"prompt\"", data("[1]\n")),
    Row(DATA, "a row without a prompt", "DIR/data.jsonl, line 1: row: got ['question']; expected the keys \"prompt\", and \"label\" and \"metadata\" where known; others: load_prompts(prompt=NAME)", data('{"question": "a"}\n')),
    Row(DATA, "a message without a role", "DIR/data.jsonl, line 1: Message.role: got None; expected one of ('system', 'user', 'assistant', 'tool')", data('{"prompt": [{"content": "a"}]}\n')),
    Row(DATA, "tool calls that are none", "DIR/data.jsonl, line 1: message.tool_calls: got 'x'; expected an object with a function that has name and arguments", data('{"prompt": [{"role": "assistant", "tool_calls": ["x"]}]}\n')),
    Row(DATA, "an image that cannot be decoded", "DIR/data.jsonl, line 1: image: got b'GIF87a'; expected an image that Pillow decodes as BMP, GIF, JPEG, PNG, TIFF or WEBP (cannot identify image file)", image("data:image/gif;base64,R0lGODdh"), needs="pillow"),
    Row(DATA, "an image that is not in the data", "DIR/data.jsonl, line 1: message.content: got {'type': 'image_url', 'image_url': {'url': 'cat.png'}}; expected a string, or a list of text parts and image parts; an image is a data: URL, bytes, a PIL image or Image", image("cat.png")),
    Row(DATA, "a prompt without text", "DIR/data.jsonl, line 1: prompt: got ''; expected some text", data('{"prompt": ""}\n')),
    Row(DATA, "messages without content", "DIR/data.jsonl, line 1: prompt: got [{'role': 'user', 'content': ''}]; expected some text", data('{"prompt": [{"role": "user", "content": ""}]}\n')),
    Row(DATA, "a table of columns", "DataBuffer.prompts: got a DataFrame; expected rows: df.to_dict('records')", lambda folder: DataBuffer(DataFrame())),
    Row(DATA, "a table of pyarrow", "DataBuffer.prompts: got a Table; expected rows: table.to_pylist()", table, needs="pyarrow"),
    Row(DATA, "an open file", "DataBuffer.prompts: got an open file; expected load_prompts(path)", open_file),
    Row(DATA, "a path", "DataBuffer.prompts: got a path, 'DIR/data.jsonl'; expected load_prompts(path)", lambda folder: DataBuffer(folder / "data.jsonl")),
    Row(DATA, "nested without end", "DIR/data.jsonl, line 1: not JSON (maximum recursion depth exceeded…)", data("[" * 100_000)),
    Row(FOREIGN, "a world that does not start", "World.start raised ConnectionError: the world is down", world(start=raises)),
    Row(FOREIGN, "a step that raises", "World.step raised ConnectionError: the world is down", world(step=raises)),
    Row(FOREIGN, "a step that hangs", "World.step did not answer within 0.05 s", world(step=hangs, seconds=0.05)),
    Row(FOREIGN, "a step that returns nothing", "World.step: no messages and not done; expected one or the other", world(step=nothing)),
    Row(FOREIGN, "a step that answers in two ways", "World.step: StepResult.continuation: got ' and'; expected none with messages: a step answers in one way", world(step=two_ways)),
    Row(FOREIGN, "a step whose reward is not a number", "World.step: StepResult.reward: got nan; expected a finite number", world(step=unpaid)),
    Row(FOREIGN, "a step whose metric is not a number", "World.step: StepResult.metrics['found']: got 'yes'; expected a finite number", world(step=uncounted)),
    Row(FOREIGN, "a start that returns a text", "World.start: messages: got 'hello'; expected a sequence of messages", world(start=a_text)),
    Row(FOREIGN, "a step that returns a text", "World.step: got 'hello'; expected a StepResult", world(step=a_text)),
    Row(FOREIGN, "a tool that returns None", "Shop.step: tool look (…): got None; expected a string, a number, an image, or a list of strings and images, which the model reads", tool_result(None)),
    Row(FOREIGN, "a tool that returns bytes", "Shop.step: tool look (…): got b'plums'; expected a string, a number, an image, or a list of strings and images, which the model reads", tool_result(b"plums")),
    Row(FOREIGN, "a list that hides the tools", "Shop.tools: got []; expected no such attribute: it hides the methods marked with tool (add, …)", hiding_tools),
    Row(FOREIGN, "a reward of two arguments", "RolloutConfig.reward_fn: got of_two(sample: 'Sample', label: 'str') -> 'float'; expected a function that is called with one argument", configured(reward_fn=of_two)),
    Row(FOREIGN, "a group reward that forgets samples", "group … failed: RewardFailure: group reward one_for_all returned 1 rewards for 2 samples", batch(reward_fn=one_for_all, group_rm=True)),
    Row(FOREIGN, "a reward that changes what identifies a sample", "group … failed: RewardFailure: reward changes_place: Sample.group_index: got 7; expected 0, unchanged", batch(reward_fn=changes_place)),
    Row(FOREIGN, "metadata that contains itself", "group … failed: RewardFailure: after reward stores_itself: Sample.metadata: nested deeper than 100 levels, or in itself", batch(reward_fn=stores_itself)),
    Row(FOREIGN, "a filter that drops all groups", "filter drops_all accepted none of the last 1 groups; every reward was 0, so there is nothing to learn (keep=\"all\" of agent_recipe, in place of a filter, keeps such groups); mean reward 0", batch(reward_fn=lambda sample: 0.0, filter_fn=drops_all, patience=1, over_sampling_factor=1)),
    Row(FOREIGN, "a reward that always raises, in a rehearsal", "3 of 3 rehearsals with random replies failed alike: RewardFailure: reward broken raised KeyError: 'label' (…). No prompt was taken; --no-rehearsal starts the run nevertheless", rehearsed(reward_fn=broken)),
    Row(FOREIGN, "a reward that raises", "group … failed: RewardFailure: reward broken raised KeyError: 'label'", batch(reward_fn=broken)),
    Row(FOREIGN, "a reward that is not a number", "group … failed: RewardFailure: reward from not_a_number: got nan; expected a finite number", batch(reward_fn=not_a_number)),
    Row(FOREIGN, "a label that is NaN, as pandas fills a missing one", "label: got nan; expected text, or several texts", labelled(exact_match, float("nan"))),
    Row(FOREIGN, "a label that is not a text", "label: got True; expected text, or several texts", labelled(exact_match, True)),
    Row(FOREIGN, "a label that is not a number", "label: got None; expected a number", labelled(numeric_match, None)),
    Row(FOREIGN, "a reward that hangs", "group … failed: RewardFailure: reward hangs did not answer within 0.05 s", batch(reward_fn=hangs, reward_seconds=0.05)),
    Row(FOREIGN, "a filter that does not return a bool", "group … failed: FilterFailure: filter never: got 'yes'; expected True or False", batch(filter_fn=never)),
    Row(FOREIGN, "a generate function that forgets a rollout", "group … failed: GenerateFailure: generate_fn empty: got []; expected a list of one Sample", batch(generate_fn=empty)),
    Row(SERVED, "a split that an ORS server does not have", "split: got 'dev'; expected one of train (http://…)", wrong_split),
    *(Row(SERVED, bad.what, bad.message, run_with_sound_prompts(bad), bad.needs) for bad in BAD),
    Row(SERVER, "a server with another protocol", "http://… is not an SGLang server: GET /model_info returned status 404: …. Expected a model_path from /model_info or /server_info; a vLLM server needs --provider vllm (Endpoint.provider). Other servers cannot be used: a run sends token ids and gets token ids with their logprobs; OpenAI's chat API has no token ids", described("sglang")),
    Row(SERVER, "the URL of an OpenAI API", "http://…/v1 is not an SGLang server: …; a vLLM server needs --provider vllm (Endpoint.provider). The URL ends in /v1: leave that out", described("sglang", "/v1")),
    Row(SERVER, "the URL of vLLM's OpenAI API", "http://…/v1 is not a vLLM server: …. Expected a model of 'vllm' from /v1/models. The URL ends in /v1: leave that out", described("vllm", "/v1/")),
    Row(SERVER, "the wrong key", "status 401: who are you (POST http://…/generate)", asked(Answer(401, b'{"error":"who are you"}'))),
    Row(SERVER, "a page of a proxy", "gave up after 1 attempts: status 200, but the body is not JSON: <html>", asked("not_json")),
    Row(SERVER, "a server that stays overloaded", "http://… takes no request (status 503: The request queue is full. (POST http://…/generate)); no request was answered for 0 s (Endpoint.outage_seconds)", asked("error_503", outage_seconds=0)),
    Row(SERVER, "more than the context holds", "status 400: The input (9 tokens) is longer than the model's context length (8 tokens). (POST http://…/generate)", asked("error_context")),
    Row(SERVER, "ids that were not sent", "5 ids were sent; the server counts 6", asked("wrong_count")),
    Row(SERVER, "logprobs of other ids", "output_token_logprobs are not those of output_ids: first difference at 2", asked("wrong_ids")),
    Row(SERVER, "a logprob that is not a number", "output_token_logprobs[0]: got nan; expected a finite number", asked("nan")),
    Row(SERVER, "a logprob above 0", "output_token_logprobs[0]: got 5.0; expected a logprob <= 0, with a tolerance of 0.0001 for rounding", asked(sampled(7, 5.0))),
    Row(SERVER, "an id outside the vocabulary", "output_ids[0]: got id 1000000; expected 0 <= id < 509 (vocab_size): does the tokenizer belong to the server's model?", asked(sampled(1_000_000, -0.5), vocab_size=509)),
    Row(SERVER, "no logprobs", "3 sampled ids came without the requested output_token_logprobs", asked("no_logprobs")),
    Row(CALLS, "a call that is not JSON", "Error: The tool call could not be read: it is not valid JSON: …", spoken('<tool_call>\n{"name": "add", "arguments": {\n</tool_call>')),
    Row(CALLS, "an unknown tool", "Error: there is no tool 'fly'; the tools are: add, subtract, multiply, divide", spoken('<tool_call>\n{"name": "fly", "arguments": {}}\n</tool_call>')),
    Row(CALLS, "an argument of another type", "Error: Expected `float`, got `str` - at `$.b`", called("add", a=1, b="2")),
    Row(CALLS, "an argument that is missing", "Error: Object missing required field `b`", called("add", a=1)),
    Row(CALLS, "a result of 100 kB", "x…x\n[truncated: the first 65536 of 100000 bytes]", tool_result("x" * 100_000)),
    Row(CALLS, "an unknown argument", "Error: Object contains unknown field `c`", called("add", a=1, b=2, c=3)),
    Row(DISK, "a bit that flipped", "DIR/journal/segment-000000.journal, offset …: damaged (the record's checksum does not fit)", damaged(flip)),
    Row(DISK, "a bit of a stored sample that flipped", "DIR/run/dropped.jsonl, line 1: corrupted (its checksum does not fit)", stored(b'"question', b'"puestion')),
    Row(DISK, "a stored sample that was cut", "DIR/run/dropped.jsonl, line 1: corrupted (JSON is malformed: …)", stored(b',"crc32":', b"")),
    Row(DISK, "a segment that is gone", "DIR/journal/segment-000000.journal, offset 0: the segment is missing", damaged(lambda path: (path / "segment-000000.journal").unlink())),
    Row(DISK, "another process that writes", "journal: got 'DIR/journal'; expected a journal that no other process is writing to", twice),
]
# fmt: on

_HEAD = """# Bad inputs and faults

Written by `scripts/docs/write bad_inputs`; do not edit. A test provokes each row and compares the message. `…` matches any text,
`DIR` is a folder. What a run does about a fault is on the page about [failures](failures.md).
"""


def page() -> str:
    """The page with the table."""
    lines = [_HEAD]
    for chapter in dict.fromkeys(row.chapter for row in ROWS):
        lines += [f"## {chapter}\n", "| what is wrong | message |", "|---|---|"]
        lines += [f"| {row.what} | `{row.message}` |" for row in ROWS if row.chapter == chapter]
        lines.append("")
    return "\n".join(lines)
