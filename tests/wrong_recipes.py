"""Wrong recipes, with the message that refuses each of them before its first token: rows of docs/bad_inputs.md."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

import attrs
from rich.console import Console

from rollouts.commands.run import launch
from rollouts.commands.target import RunTarget
from rollouts.engine import DEMO_MODEL
from rollouts.errors import RolloutsError
from rollouts.testing.server import StubServer

__all__ = ["DOUBTFUL", "WRONG", "Wrong", "run_wrong", "say_doubts"]

_FILE = """\
import asyncio, sys, time
from rollouts.dtypes import Endpoint, Limits, Message, Tool
from rollouts.environments import StepResult, ToolEnvironment, ToolResult, tool
from rollouts.recipe import agent_recipe
from rollouts.rewards import exact_match, numeric_match
from rollouts.training import Sample, load_prompts

class World(ToolEnvironment):
{world}

def reward(sample):
    {reward}

def keep_group(samples):
    {filter}

PROMPTS = {prompts}

{recipe}
"""

_SOUND: Mapping[str, str] = {
    "world": "@tool\nasync def look(self, at: str) -> str:\n    '''Look at something.'''\n    return at",
    "reward": "return float(len(sample.response) % 2)",
    "filter": "return True",
    "prompts": '[{"prompt": f"What is 1 + {number}?", "label": str(number)} for number in range(100)]',
    "options": "",
    "environment": "World",
}


@attrs.frozen
class Wrong:
    """One wrong recipe."""

    what: str
    message: str
    """The message; ``…`` matches anything, ``DIR`` is the folder."""
    changes: Mapping[str, str]
    """The parts of the sound file that it replaces; ``file`` replaces all."""

    @property
    def text(self) -> str:
        parts = {**_SOUND, **self.changes}
        if "file" in parts:
            return parts["file"]
        options = f"reward_fn=reward, {parts['options']}"
        recipe = f"def recipe(endpoint):\n    return agent_recipe('toy', endpoint, {parts['environment']}, PROMPTS, {options})"
        parts["world"] = "\n".join(f"    {line}" for line in parts["world"].splitlines())
        return _FILE.format(**{"recipe": recipe, **parts})


async def run_wrong(wrong: Wrong, folder: Path) -> str:
    """The message of a run of the recipe, as ``rollouts run`` plays it; it names requests and files, if there are any."""
    path, out = folder / "mine.py", folder / "run"
    path.write_text(wrong.text)
    async with StubServer(model_info={"model_path": str(DEMO_MODEL), "weight_version": "v1"}) as server:
        target = RunTarget(recipe=path, urls=(server.url,), batches=1)
        try:
            await launch(target, out, "jsonl", False, Console(file=io.StringIO()))
            message = "the run ended"
        except RolloutsError as error:
            message = str(error)
        left = [f"{len(server.requests)} requests"] * bool(server.requests) + ["a folder"] * out.exists()
        return ", ".join([*left, message])


async def say_doubts(wrong: Wrong, folder: Path) -> str:
    """The lines of ``rollouts run`` on a legal recipe that begin as the message does."""
    path, console = folder / "mine.py", Console(file=io.StringIO(), width=1000)
    path.write_text(wrong.text)
    async with StubServer(model_info={"model_path": str(DEMO_MODEL), "weight_version": "v1"}) as server:
        await launch(RunTarget(recipe=path, urls=(server.url,), batches=1), folder / "run", "jsonl", False, console)
    lines = console.file.getvalue().partition("files: ")[0].splitlines()  # type: ignore[attr-defined]
    return "".join(line for line in lines if line.startswith(wrong.message.partition("…")[0]))


def changed(**parts: str) -> dict[str, str]:
    return parts


def world(code: str, **parts: str) -> dict[str, str]:
    """The code of the environment class."""
    return {"world": code, **parts}


def tool(body: str, arguments: str = "self, at: str") -> dict[str, str]:
    """The body of the only tool."""
    return {"world": f"@tool\nasync def look({arguments}) -> str:\n    '''Look.'''\n    {body}"}


def start(body: str) -> dict[str, str]:
    return {"world": f"async def start(self, prompt):\n    {body}"}


def step(body: str, **parts: str) -> dict[str, str]:
    return {"world": f"async def step(self, reply):\n    {body}", **parts}


def filtered(body: str) -> dict[str, str]:
    return {"filter": body, "options": "filter_fn=keep_group"}


def recipe(body: str) -> dict[str, str]:
    return {"recipe": f"def recipe(endpoint):\n    {body}"}


REHEARSED = "3 of 3 rehearsals with random replies failed alike: "
CALLED = "3 of 3 calls of the tool look, with arguments that fit its schema, failed alike: World.step"
SMALL = "keep='all', batch_size=1, n_samples_per_prompt=1, over_sampling_factor=1"
CHANGED = "got values that it changed; expected those of the replies"

# One line for each recipe.
# ruff: noqa: E501
# fmt: off
WRONG = [
    # -- the file
    Wrong("a syntax error", "DIR/mine.py, line 1: importing the recipe raised SyntaxError: …", changed(file="def recipe(endpoint)\n    pass\n")),
    Wrong("a module that is not installed", "DIR/mine.py, line 1: importing the recipe raised ModuleNotFoundError: No module named 'numpyy'", changed(file="import numpyy\n")),
    Wrong("a recipe without return", "the value that the recipe returned: got None; expected a Recipe, by return agent_recipe(...)", recipe("agent_recipe('toy', endpoint, World, PROMPTS)")),
    Wrong("a recipe without its endpoint", "recipe recipe: got 'no parameter'; expected recipe(endpoint, *, ...)", changed(recipe="def recipe():\n    pass")),
    Wrong("a recipe without its endpoint, with options", "recipe recipe: got '(*, size: int = 2)'; expected recipe(endpoint, *, ...)", changed(recipe="def recipe(*, size: int = 2):\n    pass")),
    Wrong("an async recipe", "recipe recipe: got 'async def'; expected def: a recipe is called, not awaited", changed(recipe="async def recipe(endpoint):\n    pass")),
    Wrong("a recipe that raises", "recipe recipe raised KeyError: 'data' (DIR/mine.py, line …)", recipe("raise KeyError('data')")),
    Wrong("a recipe without a name", "recipe recipe raised TypeError: agent_recipe() missing 1 required positional argument: 'prompts' (DIR/mine.py, line …)", recipe("return agent_recipe(endpoint, World, PROMPTS)")),
    Wrong("prompts in the place of the environment", "DataBuffer.prompts: got <class 'rollouts_recipe_mine.World'>; expected a list of prompts", recipe("return agent_recipe('toy', endpoint, PROMPTS, World)")),
    Wrong("an endpoint that is a URL", "endpoint: got 'http://127.0.0.1:1'; expected an Endpoint", recipe("return agent_recipe('toy', 'http://127.0.0.1:1', World, PROMPTS)")),
    Wrong("a provider that has no token ids", "Endpoint.provider: got 'openai'; expected \"sglang\" or \"vllm\": a run sends token ids and gets token ids with their logprobs; OpenAI's chat API has no token ids", recipe("return agent_recipe('toy', Endpoint(provider='openai'), World, PROMPTS)")),
    # -- tools
    Wrong("methods without the mark of a tool", "World.tools: got 'none'; expected @tool before the methods that the model may call: look", world("def look(self, at: str) -> str:\n    return at")),
    Wrong("a tool without self", "World.look: got '(at, near)'; expected self as the first argument of a tool", tool("return at", "at: str, near: str")),
    Wrong("a tool that is a static method", "DIR/mine.py, line …: importing the recipe raised ConfigError: World.look: got a staticmethod; expected @tool alone, on a method with self", world("@staticmethod\n@tool\ndef look(at: str) -> str:\n    '''Look.'''\n    return at")),
    Wrong("a tool that is a property", "DIR/mine.py, line …: importing the recipe raised ConfigError: @tool: got a property; expected a method with self", world("@tool\n@property\ndef look(self) -> str:\n    '''Look.'''\n    return 'x'")),
    Wrong("a tool named as a method of the class", "DIR/mine.py, line …: importing the recipe raised ConfigError: World.step: got a tool; expected another name: the episode calls step", world("@tool\ndef step(self, at: str) -> str:\n    '''Go.'''\n    return at")),
    Wrong("a tool named close", "DIR/mine.py, line …: importing the recipe raised ConfigError: World.close: got a tool; expected another name: the episode calls close", world("@tool\ndef close(self) -> str:\n    '''Close it.'''\n    return 'x'")),
    Wrong("an argument whose type has no such name", "World.look: got an annotation with no meaning (name 'strr' is not defined); expected types that the module has", tool("return at", "self, at: 'strr'")),
    Wrong("an argument of a class that is not JSON", "World.look(at): got <class 'object'>; expected a type of JSON, as str, …", tool("return 'x'", "self, at: object")),
    Wrong("a description in the decorator", "DIR/mine.py, line …: importing the recipe raised ConfigError: @tool: got 'Look.'; expected no arguments: the docstring of the method is its description", world("@tool('Look.')\ndef look(self, at: str) -> str:\n    return at")),
    # -- options
    Wrong("an option by its beginning", "agent_recipe(n_samples): got 3; expected an option (did you mean n_samples_per_prompt?): …", changed(options="n_samples=3")),
    Wrong("an option with a misspelled name", "agent_recipe(batchsize): got 3; expected an option (did you mean batch_size…?): max_turns, …", changed(options="batchsize=3")),
    Wrong("a number that is a text", "RolloutConfig.batch_size: got '3'; expected an integer >= 1", changed(options="batch_size='3'")),
    Wrong("one rollout a prompt", "RolloutConfig.n_samples_per_prompt: got 1; expected at least 2 with filter_fn=check_reward_nonzero_std: …", changed(options="n_samples_per_prompt=1")),
    Wrong("temperature 0", "SamplingParams.temperature: got 0.0; expected a number > 0 with filter_fn=check_reward_nonzero_std: equal replies have equal rewards; or keep=\"all\", which drops no group", changed(options="temperature=0.0")),
    Wrong("the most likely token only", "SamplingParams.top_k: got 1; expected not 1 with filter_fn=check_reward_nonzero_std: …", changed(options="top_k=1")),
    Wrong("a temperature below 0", "SamplingParams.temperature: got -1; expected a number >= 0", changed(options="temperature=-1")),
    Wrong("no turns", "Limits.max_turns: got 0; expected an integer >= 1", changed(options="max_turns=0")),
    Wrong("limits that are a dict", "limits: got {'max_turns': 3}; expected Limits(...)", changed(options="limits={'max_turns': 3}")),
    Wrong("turns twice", "max_turns: got 3; expected nothing, since limits=Limits(max_turns=4…", changed(options="max_turns=3, limits=Limits(max_turns=4)")),
    Wrong("groups to keep that are not known", "keep: got 'some'; expected \"spread\" or \"all\"", changed(options="keep='some'")),
    Wrong("groups to keep, twice", "keep: got 'all'; expected none with filter_fn: each of them decides which groups to keep", changed(options="keep='all', filter_fn=keep_group")),
    Wrong("a filter that is a name", "RolloutConfig.filter_fn: got 'check_reward_nonzero_std'; expected a function or None", changed(options="filter_fn='check_reward_nonzero_std'")),
    Wrong("a history that is not known", "history: got 'forks'; expected one of ('append', 'fork', 'error')", changed(options="history='forks'")),
    Wrong("a dialect that is not known", "dialect: got 'nonsense'; expected one of …", changed(options="dialect='nonsense'")),
    Wrong("a sampler that is not known", "sampler: got 'best'; expected \"uniform\", …", changed(options="sampler='best'")),
    Wrong("a stop string without a character", "SamplingParams.stop: got ('',); expected a string or several, none empty, at most 32", changed(options="stop=['']")),
    Wrong("more groups in flight than can be", "RolloutConfig: batch_size * over_sampling_factor: got 32000000000.0; expected at most 1000000 groups in flight", changed(options="over_sampling_factor=1e9")),
    Wrong("a chat template that is the name of a file", "chat_template: got 'none.jinja'; expected template text, in Jinja; a file is Path('none.jinja')", changed(options="chat_template='none.jinja'")),
    Wrong("a variable that the template does not read", "template_kwargs: got 'thinking'; expected a variable that … reads: none", changed(options="template_kwargs={'thinking': True}")),
    Wrong("a shuffle that is a text", "shuffled: got 'yes'; expected True or False", changed(options="shuffled='yes'")),
    # -- prompts
    Wrong("no prompts", "DataBuffer.prompts: got []; expected at least one prompt", changed(prompts="[]")),
    Wrong("prompts that are one text", "DataBuffer.prompts: got 'What?'; expected a list of prompts", changed(prompts="'What?'")),
    Wrong("a file that does not exist", "DIR/mine.py, line …: importing the recipe raised ConfigError: data: got 'none.jsonl'; expected a .jsonl, …", changed(prompts="load_prompts('none.jsonl')")),
    Wrong("rows with another key", "prompts[0]: row: got ['question']; expected the keys \"prompt\", and …", changed(prompts="[{'question': 'What?'}]")),
    Wrong("an empty prompt", "prompts[0]: prompt: got ''; expected some text", changed(prompts="[{'prompt': ''}]")),
    Wrong("a role that is not known", "prompts[0]: Message.role: got 'human'; expected one of ('system', 'user', 'assistant', 'tool')", changed(prompts="[{'prompt': [{'role': 'human', 'content': 'x'}]}]")),
    Wrong("metadata that is a list", "prompts[0]: metadata: got ['x']; expected an object", changed(prompts="[{'prompt': 'a', 'metadata': ['x']}]")),
    Wrong("no labels", "prompts[0].label: got None, as 2 of 2 prompts; expected a label: label: got None; expected text, or several texts; load_prompts(label=NAME) names its column; --no-rehearsal starts the run nevertheless", changed(prompts="['a', 'b']", reward="return exact_match(sample)")),
    Wrong("no labels, for a reward of one's own", "prompts[0].label: got None, as 2 of 2 prompts; expected a label: reward reward raised AttributeError: 'NoneType' object has no attribute 'strip' (DIR/mine.py:… in reward); …", changed(prompts="['a', 'b']", reward="return float(sample.label.strip() in sample.response)")),
    Wrong("a label that is missing", "prompts[1].label: got None, as 1 of 2 prompts; expected a label: …", changed(prompts="[{'prompt': 'a', 'label': 'a'}, {'prompt': 'b'}]", reward="return exact_match(sample)")),
    Wrong("a label that is not a number", REHEARSED + "RewardFailure: label: got 'many'; expected a number. …", changed(prompts="[{'prompt': 'a', 'label': 'many'}] * 9", reward="return numeric_match(sample)")),
    # -- environments
    Wrong("an instance in the place of a class", "Recipe.environment_cls: got <rollouts_recipe_mine.World object …; expected an environment class, or a functools.partial of one", changed(environment="World()")),
    Wrong("a class that is not an environment", "Recipe.environment_cls(): got <object object …; expected an object with tools, start, step and close", changed(environment="object")),
    Wrong("a function that returns the class", "Recipe.environment_cls(): got <class 'rollouts_recipe_mine.World'>; expected an object with tools, start, step and close", changed(environment="lambda: World")),
    Wrong("a class with arguments", "World() raised TypeError: World.__init__() missing 1 required positional argument: 'size'", world("def __init__(self, size):\n    pass")),
    Wrong("a tool without a docstring", "World.look: got 'no docstring'; expected a docstring: the model reads its first line as the description of the tool", world("@tool\nasync def look(self, at: str) -> str:\n    return at")),
    Wrong("a tool with an argument of no type", "World.look(at): got 'no annotation'; expected a type for each argument of a tool", tool("return at", "self, at")),
    Wrong("a tool with any number of arguments", "World.look(at): got '*at: str'; expected named arguments only: a model cannot pass others", tool("return 'x'", "self, *at: str")),
    Wrong("a tool that raises", CALLED + " raised KeyError: … (DIR/mine.py:… in look). A ValueError is an answer that the model reads; any other error fails the rollout. …", tool("raise KeyError(at)")),
    Wrong("a tool that imports what is not installed", CALLED + " raised ModuleNotFoundError: No module named 'numpyy' (DIR/mine.py:… in look). …", tool("import numpyy")),
    Wrong("a tool that exits", CALLED + " raised SystemExit: 2 (DIR/mine.py:… in look). …", tool("sys.exit(2)")),
    Wrong("a tool that calls itself without end", CALLED + " raised RecursionError: maximum recursion depth exceeded…", tool("return await self.look(at)")),
    Wrong("a tool that returns nothing", CALLED + ": tool look (DIR/mine.py:…): got None; expected a string, a number, …", tool("pass")),
    Wrong("a tool that returns bytes", CALLED + ": tool look (DIR/mine.py:…): got b'x'; expected a string, a number, …", tool("return b'x'")),
    Wrong("a tool that returns a dict", CALLED + ": tool look (DIR/mine.py:…): got {'a': 1}; expected a string, a number, …", tool("return {'a': 1}")),
    Wrong("a tool that yields", CALLED + ": tool look (DIR/mine.py:…): got <async_generator object …; expected a string, a number, …", tool("yield at")),
    Wrong("a tool whose reward is not a number", CALLED + ": StepResult.reward[0]: got nan; expected a finite number. …", tool("return ToolResult('x', reward=float('nan'))")),
    Wrong("a tool that hangs", CALLED + " did not answer within 0.2 s. …", {**tool("await asyncio.sleep(100)"), "options": "limits=Limits(step_seconds=0.2)"}),
    Wrong("a list that hides the tools", "DIR/mine.py, line …: importing the recipe raised ConfigError: World.tools: got []; expected no such attribute: it hides the methods marked with tool (look)", world("tools = []\n" + _SOUND["world"])),
    Wrong("tools that are names", "World.tools: got 'look'; expected Tools", world("tools = ['look']")),
    Wrong("no tools, as None", "World.tools: got None; expected a sequence of Tools, empty for none", world("tools = None")),
    Wrong("two tools of one name", "World.tools: got two tools 'look'; expected another name for each", world("tools = [Tool('look', 'Look.'), Tool('look', 'Again.')]")),
    Wrong("a system prompt that is a method", "DIR/mine.py, line …: importing the recipe raised ConfigError: World.system_prompt: got a method; expected a string, or a property that returns one", world("def system_prompt(self):\n    return 'Look.'")),
    Wrong("a system prompt that is a number", REHEARSED + "EnvironmentFailure: World.start raised ConfigError: Message.content: got 3; expected a string, …", world("system_prompt = 3")),
    Wrong("a start that raises", REHEARSED + "EnvironmentFailure: World.start raised ConnectionError: down (DIR/mine.py:… in start). …", start("raise ConnectionError('down')")),
    Wrong("a start without its prompt", REHEARSED + "EnvironmentFailure: World.start raised TypeError: World.start() takes 1 positional argument but 2 were given. …", world("async def start(self):\n    return []")),
    Wrong("a start that returns a text", REHEARSED + "EnvironmentFailure: World.start: messages: got 'hello'; expected a sequence of messages, …", start("return 'hello'")),
    Wrong("a start that returns nothing", REHEARSED + "EnvironmentFailure: World.start: got no messages; expected the messages that open the conversation, …", start("return []")),
    Wrong("a message without a role", REHEARSED + "EnvironmentFailure: World.start: Message.role: got None; expected one of …", start("return [{'content': 'x'}]")),
    Wrong("a step that returns messages", REHEARSED + "EnvironmentFailure: World.step: got [Message(…; expected a StepResult. …", step("return [Message('user', 'x')]")),
    Wrong("a step that returns nothing", REHEARSED + "EnvironmentFailure: World.step: no messages and not done; expected one or the other. …", step("return StepResult()")),
    Wrong("a step that hangs", REHEARSED + "EnvironmentFailure: World.step did not answer within 0.2 s. …", step("await asyncio.sleep(100)", options="limits=Limits(step_seconds=0.2)")),
    Wrong("a step whose reward is a text", REHEARSED + "EnvironmentFailure: World.step: StepResult.reward: got 'good'; expected a finite number. …", step("return StepResult(done=True, reward='good')")),
    Wrong("a step whose metric is a text", REHEARSED + "EnvironmentFailure: World.step: StepResult.metrics['a']: got 'yes'; expected a finite number. …", step("return StepResult(done=True, metrics={'a': 'yes'})")),
    Wrong("an end that is a text", REHEARSED + "EnvironmentFailure: World.step: StepResult.done: got 'yes'; expected True or False. …", step("return StepResult(done='yes')")),
    Wrong("a close that raises", "World() raised OSError: gone (DIR/mine.py:… in close)", world("async def close(self):\n    raise OSError('gone')")),
    # -- rewards and filters
    Wrong("a reward that raises", REHEARSED + "RewardFailure: reward reward raised KeyError: 'answer' (DIR/mine.py:… in reward). …", changed(reward="return float(sample.metadata['answer'] in sample.response)")),
    Wrong("a reward that reads a metric of no name", REHEARSED + "RewardFailure: reward reward raised KeyError: \"sample.metrics has no 'tool_eror' (did you mean tool_errors?)\" (DIR/mine.py:… in reward). …", changed(reward="return sample.metrics['tool_eror']")),
    Wrong("a reward that reads a field of no name", REHEARSED + "RewardFailure: reward reward raised AttributeError: 'Sample' object has no attribute 'answer' …", changed(reward="return float(sample.answer == 'x')")),
    Wrong("a reward that returns nothing", REHEARSED + "RewardFailure: reward from reward: got None; expected a finite number. …", changed(reward="pass")),
    Wrong("a reward that is not a number", REHEARSED + "RewardFailure: reward from reward: got nan; expected a finite number. …", changed(reward="return float('nan')")),
    Wrong("a reward that is a list", REHEARSED + "RewardFailure: reward from reward: got [1.0]; expected a finite number. …", changed(reward="return [1.0]")),
    Wrong("a reward that yields", REHEARSED + "RewardFailure: reward from reward: got <generator object …; expected a finite number. …", changed(reward="yield 1.0")),
    Wrong("a reward that exits", REHEARSED + "RewardFailure: reward reward raised SystemExit: 1 (DIR/mine.py:… in reward). …", changed(reward="sys.exit(1)")),
    Wrong("a reward that hangs", REHEARSED + "RewardFailure: reward reward did not answer within 0.2 s. …", changed(reward="time.sleep(1)", options="reward_seconds=0.2")),
    Wrong("a reward that changes tokens", REHEARSED + f"RewardFailure: reward reward: Sample.tokens: {CHANGED}. …", changed(reward="sample.tokens = []; return 1.0")),
    Wrong("a reward that changes the mask", REHEARSED + f"RewardFailure: reward reward: Sample.loss_mask: {CHANGED}. …", changed(reward="sample.loss_mask = [1] * len(sample.tokens); return 1.0")),
    Wrong("a reward with the label as an argument", "RolloutConfig.reward_fn: got reward(sample, label); expected a function that is called with one argument", changed(recipe="def reward(sample, label):\n    return 0.0\n\ndef recipe(endpoint):\n    return agent_recipe('toy', endpoint, World, PROMPTS, reward_fn=reward)")),
    Wrong("a number in the place of the reward", "RolloutConfig.reward_fn: got 0.5; expected a function or None", recipe("return agent_recipe('toy', endpoint, World, PROMPTS, reward_fn=0.5)")),
    Wrong("a group reward that forgets samples", REHEARSED + "RewardFailure: group reward reward returned 1 rewards for 8 samples. …", changed(reward="return [1.0]", options="group_rm=True")),
    Wrong("a group reward without group_rm", REHEARSED + "RewardFailure: reward reward raised TypeError: 'Sample' object is not iterable …", changed(reward="return [1.0 for _ in sample]")),
    Wrong("a filter that returns nothing", REHEARSED + "FilterFailure: filter keep_group: got None; expected True or False. …", filtered("pass")),
    Wrong("a filter that returns samples", REHEARSED + "FilterFailure: filter keep_group: got []; expected True or False. …", {**filtered("return [sample for sample in samples if sample.reward]"), "reward": "return float(len(sample.response) % 3 == 0)"}),
    Wrong("a filter of one sample", REHEARSED + "FilterFailure: filter keep_group raised AttributeError: 'list' object has no attribute 'reward' …", filtered("return samples.reward > 0")),
    Wrong("a filter that reads more samples than there are", REHEARSED + "FilterFailure: filter keep_group raised IndexError: list index out of range …", filtered("return samples[99].reward > 0")),
]

DOUBTFUL = [
    Wrong("a tool that sleeps", "the event loop is blocked, … s so far, and every rollout waits: DIR/mine.py:… in look; expected await, or anyio.to_thread.run_sync for a call that blocks", {**tool("time.sleep(globals().pop('ONCE', 0)); return at"), "prompts": "['What?']; ONCE = 0.5", "options": SMALL}),
    Wrong("an async reward that sleeps", "the event loop is blocked, … s so far, and every rollout waits: DIR/mine.py:… in reward; expected await, or …", changed(recipe=f"async def reward(sample):\n    time.sleep(0.5)\n    return 0.0\n\ndef recipe(endpoint):\n    return agent_recipe('toy', endpoint, World, PROMPTS, reward_fn=reward, {SMALL})")),
    Wrong("a list of the class that rollouts fill", "World.seen: a rollout changed it, and it is one object for all rollouts; expected self.seen = ... in start, or ClassVar where they share it", {**world("seen = []\n" + _SOUND["world"].replace("return at", "self.seen.append(at); return at")), "options": SMALL}),
    Wrong("a batch larger than the data", "batch_size: got 2 with 1 prompts; expected at most that many: a batch now plays some prompt more than once", changed(prompts="['What?']", options=SMALL.replace("batch_size=1", "batch_size=2"))),
    Wrong("no labels for a reward that compares them", "prompts[0].label: got None, as 2 of 2 prompts; reward reads it", changed(prompts="['a', 'b']", reward="return float(sample.response == sample.label)", options=SMALL)),
    Wrong("a prompt that ends with its answer", "prompts[0]: the last message is the assistant's, with the answer, which the reply continues; expected the user's, or the begin of a reply", changed(prompts="[[{'role': 'user', 'content': '1 + 1?'}, {'role': 'assistant', 'content': '2'}]]", options=SMALL)),
    Wrong("a prompt that is rendered already", "prompts[0]: got text with '<|im_end|>'; expected text or messages without a chat template's tokens, which the run adds", changed(prompts="['<|im_start|>user\\nWhat?<|im_end|>\\n']", options=SMALL)),
]
# fmt: on
