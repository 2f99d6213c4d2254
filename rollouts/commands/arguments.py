"""Command-line arguments shared by the verbs, and the helpers that run a verb.

Invariant: an argument is validated where it is parsed; an error quotes the argument as the user wrote it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import importlib.util
import math
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import anyio
import attrs

from rollouts.base.terminal import say
from rollouts.commands.chat_options import CHAT_PROVIDER, OPENAI_KEY, OPENAI_URL, ChatOptions
from rollouts.commands.target import RunTarget
from rollouts.concurrency.interrupts import INTERRUPTED, handling_interrupts, waking
from rollouts.dtypes import OnRewrite, Provider
from rollouts.dtypes.inference import NEEDS_TOKEN_IDS
from rollouts.errors import ConfigError, RolloutsError
from rollouts.recipe.files import RecipeFunction, load_recipe, read_options, recipe_options, summary_of
from rollouts.renderer import CallCheck, SpecialText
from rollouts.runs.info import read_info
from rollouts.runs.layout import check_files

__all__ = [
    "BAD_INPUT",
    "BROKEN",
    "INTERRUPTED",
    "above_0",
    "add_chat_options",
    "add_generate_options",
    "add_options",
    "add_output",
    "add_provider",
    "add_recipe",
    "add_repeatable",
    "add_target",
    "add_verb",
    "all_options_of",
    "at_least_0",
    "chat_of",
    "check_run",
    "dollars",
    "generate_options_of",
    "generate_settings_of",
    "in_loop",
    "numbers",
    "options_of",
    "positive",
    "recipe_help",
    "stop_signals",
    "target_of",
    "tell",
    "worker_range",
]  # fmt: skip

BAD_INPUT, BROKEN = 2, 1

Result = TypeVar("Result")


def add_provider(parser: argparse._ActionsContainer) -> None:
    """Add the option for the protocol of ``--endpoint``."""
    parser.add_argument(
        "--provider", type=_provider, metavar="{sglang,vllm}", help="protocol of --endpoint (default: sglang)"
    )


def add_chat_options(parser: argparse.ArgumentParser, *, provider: str) -> None:
    """Add ``--provider`` of a verb that plays on a chat API, too, and the options of that API."""
    parser.add_argument("--provider", type=_any_provider, metavar="{sglang,vllm,openai}", help=provider)
    chat = parser.add_argument_group("with --provider openai, any model behind OpenAI's chat completions")
    chat.add_argument("--base-url", metavar="URL", help=f"before /chat/completions (default: {OPENAI_URL})")
    chat.add_argument(
        "--api-key-env",
        dest="key_variable",
        metavar="NAME",
        help=f"environment variable with the API key (default: {OPENAI_KEY}); it is neither stored nor printed",
    )
    chat.add_argument("--price-in", type=dollars, metavar="D", help="dollars for a million prompt tokens")
    chat.add_argument("--price-out", type=dollars, metavar="D", help="dollars for a million sampled tokens")
    chat.add_argument(
        "--budget", type=above_0, metavar="D", help="dollars of this command; then it ends, and can be resumed"
    )
    chat.add_argument("--at-once", type=positive, metavar="N", help="most requests in flight (default: 32)")
    does = "further field of each request, such as reasoning_effort=low; null leaves a field out"
    add_repeatable(chat, "--body", "NAME=JSON", does)
    chat.add_argument(
        "--send-reasoning", action="store_true", help="send the thinking of earlier replies back, as some APIs need"
    )


def add_repeatable(parser: argparse._ActionsContainer, flag: str, metavar: str, does: str) -> None:
    """Add an option that may be given several times; its value is a list, empty by default."""
    parser.add_argument(flag, action="append", default=[], metavar=metavar, help=does)


def _any_provider(text: str) -> str:
    return text if text == CHAT_PROVIDER else _provider(text)


def _provider(text: str) -> str:
    if text not in get_args(Provider):
        raise argparse.ArgumentTypeError(f"got {text!r}; expected sglang or vllm: {NEEDS_TOKEN_IDS}")
    return text


def tell(error: RolloutsError, *, debug: bool) -> None:
    """Print an error as one line on standard error, without control characters; with ``debug`` after its traceback."""
    with contextlib.suppress(OSError, ValueError):  # standard error is closed
        if debug:
            say("".join(traceback.format_exception(error)), end="", file=sys.stderr)
        say(f"rollouts: error: {error}", file=sys.stderr)


def in_loop(function: Callable[..., Awaitable[Result]], *arguments: Any) -> Result:
    """Run a coroutine function to completion, on uvloop where that is installed.

    Ctrl-C, SIGTERM and a closed terminal cancel it; a second signal ends the process. SIGUSR1 reports its waits.

    Raises:
        KeyboardInterrupt: it was cancelled by a signal.
    """
    from rollouts.views.terminal.waiting import reporting_on_signal  # here: verbs without a loop have no waits

    async def interruptible() -> Result:
        loop = asyncio.get_running_loop()
        with anyio.CancelScope() as scope:
            cancel = functools.partial(loop.call_soon_threadsafe, scope.cancel)
            with waking(loop), handling_interrupts(cancel, signals=stop_signals()), reporting_on_signal():
                return await function(*arguments)
        raise KeyboardInterrupt

    return anyio.run(interruptible, backend_options={"use_uvloop": importlib.util.find_spec("uvloop") is not None})


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals that ask this process to stop: also SIGHUP, unless it is ignored, as under ``nohup``."""
    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGINT, signal.SIGTERM, *hangup)


def add_verb(verbs: Any, name: str, function: Callable[..., int], does: str, example: str) -> argparse.ArgumentParser:
    """Add a verb with its help text and an example."""
    verb: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=does,
        description=f"{does[0].upper()}{does[1:]}" + ("" if does.endswith("?") else "."),
        epilog=f"Example: rollouts {example}",
        add_help=False,
    )
    verb.add_argument("-h", "--help", action=_Help, help="show this message, with the options of RECIPE if it is given")
    # No default: it would overwrite a --debug before the verb.
    verb.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="print the traceback of an error")
    verb.set_defaults(verb=function)
    return verb


class _Help(argparse.Action):
    """Print the help of a verb, and after ``RECIPE`` the options of that recipe."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, **options)

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        parser.print_help()
        recipe = getattr(namespace, "recipe", None)
        if recipe is not None:
            say(f"\n{recipe_help(str(recipe), load_recipe(recipe))}")
        parser.exit()


def recipe_help(name: str, function: RecipeFunction) -> str:
    """A recipe's first line, then a line for each option with its type and default."""
    options = recipe_options(function)
    width = max((len(option.name) for option in options), default=0)
    lines = [
        f"  {option.name:<{width}}  {option.kind_name}, "
        + ("required" if option.required else f"default {'null' if option.default is None else option.default}")
        for option in options
    ]
    return "\n".join([f"{name}: {summary_of(function)}", *lines])


_OPTIONS: dict[str, dict[str, Any]] = {
    "--data": {"type": Path, "metavar": "PATH", "help": "data file: the recipe's option data"},
    "--seed": {"type": int, "metavar": "N", "help": "random seed: the recipe's option seed"},
    "--set": {"action": "append", "default": [], "metavar": "KEY=VALUE", "help": "set any option of the recipe"},
}


def add_options(verb: argparse.ArgumentParser, *names: str) -> None:
    """Add arguments for options of a recipe: ``--data``, ``--seed``, ``--set``."""
    for name in names:
        verb.add_argument(name, **_OPTIONS[name])


def add_recipe(verb: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """Add the argument for a recipe."""
    verb.add_argument(
        "recipe",
        type=Path,
        metavar="RECIPE",
        nargs="?" if optional else None,
        help="built-in recipe (see rollouts recipes), or Python file that defines a function recipe(...)",
    )


def add_target(verb: argparse.ArgumentParser, *, optional: bool = False, chat: bool = True) -> None:
    """Add the arguments of a verb that plays a recipe; ``chat``: those of chat APIs, too."""
    add_recipe(verb, optional=optional)
    add_repeatable(
        verb,
        "--endpoint",
        "URL",
        "URL of an SGLang or vLLM server; repeat the option for several servers. Default: start the embedded "
        "engine; with run --resume, the servers of that run. The API key is read from ROLLOUTS_API_KEY",
    )
    if chat:
        add_chat_options(verb, provider="protocol of --endpoint, or openai for a chat API (default: sglang)")
    else:
        verb.add_argument(
            "--provider", type=_any_provider, metavar="{sglang,vllm}", help="protocol of --endpoint (default: sglang)"
        )
    verb.add_argument(
        "--model", metavar="NAME_OR_DIR", help="model with its tokenizer (default: the model that the server reports)"
    )
    add_options(verb, "--data", "--seed", "--set")
    add_generate_options(verb)
    verb.add_argument(
        "--slots", type=positive, metavar="N", help="requests at once in the embedded engine (default: 64)"
    )


def add_generate_options(verb: argparse.ArgumentParser) -> None:
    """Add the options that every recipe has: how its conversations become tokens."""
    verb.add_argument(
        "--history",
        choices=get_args(OnRewrite),
        help="where the chat template rewrites the history: keep the ids, open a branch, or fail (default: append)",
    )
    verb.add_argument(
        "--template-kwargs", metavar="JSON", help="variables of the chat template, e.g. '{\"enable_thinking\": false}'"
    )
    verb.add_argument(
        "--chat-template", type=Path, metavar="FILE", help="chat template to use instead of the model's own"
    )
    verb.add_argument("--dialect", metavar="NAME", help="notation of tool calls (default: the template's)")
    verb.add_argument(
        "--calls",
        choices=get_args(CallCheck),
        help="unchecked: start with --dialect, whatever calls the template writes (default: checked)",
    )
    verb.add_argument(
        "--stop", type=int, action="append", metavar="ID", help="token id that ends a turn (default: the model's)"
    )
    verb.add_argument(
        "--special-text",
        choices=get_args(SpecialText),
        help="special tokens in the text of users and tools: their ids, plain text, or refused (default: as_ids)",
    )
    verb.add_argument(
        "--images",
        action="store_const",
        const="true",
        help="messages may have images: the processor of the model is loaded (default: images are refused)",
    )


def add_output(verb: argparse.ArgumentParser) -> None:
    """Add the options for the output of a verb: ``--json`` and ``--quiet``."""
    verb.add_argument("--json", action="store_true", help="print the result as JSON; progress goes to standard error")
    verb.add_argument("--quiet", action="store_true", help="print no progress, only the result of --json and errors")


def check_run(path: Path, argument: str = "RUN") -> None:
    """Check that a folder contains a run whose files may be opened.

    Raises:
        ConfigError: as :func:`read_info`, with the argument; or it has a FIFO, a device or a sparse file.
    """
    read_info(path, argument)
    check_files(path)


def options_of(args: argparse.Namespace) -> dict[str, str]:
    """The recipe options of ``--set``."""
    options = {}
    for text in args.set:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError.of("--set", text, "key=value")
        options[name] = value
    return options


def all_options_of(args: argparse.Namespace) -> dict[str, str]:
    """The recipe options of ``--set``, and of the arguments that are short for one."""
    options = options_of(args)
    for name in ("data", "seed"):
        if getattr(args, name, None) is not None:
            options[name] = str(getattr(args, name))
    return {**options, **generate_options_of(args)}


def generate_options_of(args: argparse.Namespace) -> dict[str, str]:
    """The recipe options of :func:`add_generate_options`."""
    names = ("history", "template_kwargs", "chat_template", "dialect", "calls", "special_text", "images")
    values = {name: getattr(args, name, None) for name in names}
    values["stop_token_ids"] = getattr(args, "stop", None)
    return {name: str(value) for name, value in values.items() if value is not None}


def generate_settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """The options of :func:`add_generate_options` as values, for a verb without a recipe."""

    def without_options(endpoint: Any) -> Any: ...

    return read_options(without_options, generate_options_of(args))


def target_of(args: argparse.Namespace) -> RunTarget:
    """The target that the arguments of :func:`add_target` describe."""
    return RunTarget(
        recipe=args.recipe,
        urls=tuple(args.endpoint),
        provider=args.provider,
        model=args.model,
        options=all_options_of(args),
        batches=getattr(args, "batches", None),
        slots=args.slots,
        chat=chat_of(args) if hasattr(args, "base_url") else ChatOptions(),
    )


def chat_of(args: argparse.Namespace) -> ChatOptions:
    """The options of :func:`add_chat_options`.

    Raises:
        ConfigError: one is given without ``--provider openai``, or only one of the prices.
    """
    of_run = args.provider is None and getattr(args, "as_text", None) is not None and args.resume is not None
    if args.provider == CHAT_PROVIDER and args.endpoint:
        raise ConfigError.of("--endpoint", args.endpoint, "none with --provider openai: --base-url is the API's URL")
    options = {field.name: getattr(args, field.name) for field in attrs.fields(ChatOptions)}
    if args.provider != CHAT_PROVIDER and not of_run:  # a resumed run knows its provider
        for name, value in options.items():
            if value not in (None, [], False):
                flag = "--api-key-env" if name == "key_variable" else f"--{name.replace('_', '-')}"
                raise ConfigError.of(flag, value, "none without --provider openai")
    if (args.price_in is None) != (args.price_out is None):
        got = f"--price-in {args.price_in}, --price-out {args.price_out}"
        raise ConfigError.of("prices", got, "both, or none")
    return ChatOptions(**{**options, "body": tuple(args.body)})


def numbers(text: str) -> tuple[int, ...]:
    """Parse ``1,8`` as integers >= 1."""
    return tuple(positive(part) for part in text.split(","))


def positive(text: str) -> int:
    """Parse an integer >= 1."""
    return _integer(text, 1)


def worker_range(text: str) -> int | tuple[int, int]:
    """Parse a number of workers, or a minimum and a maximum: ``MIN:MAX``."""
    least, colon, most = text.partition(":")
    if not colon:
        return positive(text)
    if (bounds := (positive(least), positive(most))) != tuple(sorted(bounds)):
        raise argparse.ArgumentTypeError(f"got {text}; expected a minimum and a maximum, as in 4:8")
    return bounds


def above_0(text: str) -> float:
    """Parse a number > 0."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"got {text}; expected a number > 0")
    return number


def dollars(text: str) -> float:
    """Parse a price."""
    return 0.0 if float(text) == 0 else above_0(text)


def port(text: str) -> int:
    """Parse the number of a port; 0 picks a free one."""
    if not text.isdecimal() or int(text) >= 2**16:
        raise argparse.ArgumentTypeError(f"got {text}; expected a port, 0 to 65535")
    return int(text)


def at_least_0(text: str) -> int:
    """Parse an integer >= 0."""
    return _integer(text, 0)


def _integer(text: str, least: int) -> int:
    number = int(text)
    if number < least:
        raise argparse.ArgumentTypeError(f"got {text}; expected an integer >= {least}")
    return number
