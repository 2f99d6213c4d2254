"""The Jinja environment of chat templates, and the program that tries a template in a separate process.

Invariant: a template that is tried here has ended within a time and a memory limit before it is compiled in the main
process, where nothing could end it. It imports jinja2 and the standard library only, so that the process starts fast.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import re
import resource
import signal
import subprocess
import sys
from types import BuiltinMethodType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

__all__ = ["TemplateSandbox", "problem_of"]

TRIAL_SECONDS = 10.0
_WALL_PER_CPU = 6.0
_TRIAL_BYTES = 2 << 30
_TEXT_CHARACTERS = 1 << 24
"""Of the rendering of one short conversation."""
_NOT_ASCII = re.compile("[^\x00-~\udfff]")  # without the guard of special_text.py, which the encoder removes


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks the text to train on; here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012 - the attribute that jinja reads

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class TemplateSandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox of transformers, with fast paths for the most frequent lookups; the results are the same.

    Rendering without one of them takes this many times as long (medians of seven templates with 1 and 20 rounds of
    tools): dicts 1.7, loops 1.3, namespaces 1.5, methods of strings 1.05, calls 1.07.
    """

    @classmethod
    def for_chat(cls, moment: datetime.datetime) -> TemplateSandbox:
        """The environment with the options, extensions and functions that chat templates expect."""
        environment = cls(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        environment.filters["tojson"] = tojson
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": moment.strftime}
        return environment

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        if kind in _SAFE and attribute in _SAFE[kind]:
            return getattr(obj, attribute)  # public, and changes nothing
        if kind is jinja2.utils.Namespace and attribute[:1] != "_":
            values = object.__getattribute__(obj, "_Namespace__attrs")  # its own lookup is two Python functions
            if attribute in values:
                return values[attribute]
        return super().getattr(obj, attribute)

    def call(self, context: jinja2.runtime.Context, obj: Any, /, *arguments: Any, **options: Any) -> Any:
        of_text = type(obj) is BuiltinMethodType and type(obj.__self__) is str and obj.__name__[:6] != "format"
        if of_text or obj is jinja2.utils.Namespace:  # until 3.1.5, Jinja checks the fields of a format at its call
            options.pop("_loop_vars", None)  # jinja passes these two only to functions that take the context
            options.pop("_block_vars", None)
            return obj(*arguments, **options)
        return super().call(context, obj, *arguments, **options)


_DICT_ATTRIBUTES = frozenset(dir(dict))
_SAFE = {
    jinja2.runtime.LoopContext: frozenset({"first", "last", "index", "index0", "previtem", "nextitem"}),
    str: frozenset({"startswith", "endswith", "strip", "lstrip", "rstrip", "split"}),
}


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Encode without the HTML escapes and sorted keys of Jinja's own filter: models were trained without either."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return _NOT_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], text) if ensure_ascii else text


# -- the trial --------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def problem_of(source: str, variables: str, seconds: float = TRIAL_SECONDS) -> str | None:
    """Compile and render a template in a separate process; return the reason why it is unusable, or ``None``.

    An error that the template raises, or a syntax error, is not a problem: it raises again where it can be reported.

    Args:
        source: the template's text.
        variables: JSON of its variables.
        seconds: CPU time of the process; its deadline is several times as long, because the machine may be busy.
    """
    request = json.dumps({"source": source, "variables": variables, "seconds": seconds})
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            [sys.executable, "-P", __file__],
            input=request,
            capture_output=True,
            text=True,
            encoding="utf-8",
            env=environment,
            timeout=_WALL_PER_CPU * seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it does not end within {_WALL_PER_CPU * seconds:g} s"
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"it does not end within {seconds:g} s of CPU time"
    if done.returncode == 0:
        return done.stdout.strip() or None
    return f"rendering it ended the process with status {done.returncode}: {done.stderr.strip()[-300:]}"


def _try(request: dict[str, Any]) -> str:
    seconds = max(1, round(request["seconds"]))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (_TRIAL_BYTES, _TRIAL_BYTES))
    environment = TemplateSandbox.for_chat(datetime.datetime.now())
    variables = json.loads(request["variables"])
    try:
        compiled = environment.from_string(request["source"])
    except MemoryError:
        return f"it needs more than {_TRIAL_BYTES >> 30} GiB of memory to compile"
    except Exception:  # noqa: BLE001 - reported where it is compiled for use
        return ""
    for messages, tools, prompted in _conversations():
        try:
            values = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompted}
            text = compiled.render(**{**values, **variables})
        except MemoryError:
            return f"it needs more than {_TRIAL_BYTES >> 30} GiB of memory for a short conversation"
        except Exception:  # noqa: BLE001 - a template may raise anything, e.g. on a role that it does not know
            continue
        if len(text) > _TEXT_CHARACTERS:
            return f"it writes {len(text):,} characters for a short conversation; expected at most {_TEXT_CHARACTERS:,}"
    return ""


def _conversations() -> list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None, bool]]:
    system: dict[str, Any]
    user: dict[str, Any]
    tools: list[dict[str, Any]]
    found: list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None, bool]]
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 6 * 7?"}
    parts = {"role": "user", "content": [{"type": "text", "text": "What is 6 * 7?"}]}
    reply = {"role": "assistant", "content": "42"}
    schema = {"type": "object", "properties": {"x": {"type": "string", "description": "Any."}}}
    tools = [{"type": "function", "function": {"name": "probe", "description": "Probes.", "parameters": schema}}]
    result = {"role": "tool", "content": "42", "tool_call_id": "call00000", "name": "probe"}
    found = [([user], None, True), ([parts], None, True), ([user, reply, user], None, True)]
    found += [([system, user], tools, True), ([system, user, reply, user, reply], tools, False)]
    for content in ("", None):
        for arguments in ({"x": "1"}, '{"x": "1"}'):
            call = {"type": "function", "id": "call00000", "function": {"name": "probe", "arguments": arguments}}
            turn = {"role": "assistant", "content": content, "tool_calls": [call]}
            found.append(([system, user, turn, result, reply, user], tools, True))
    return found


if __name__ == "__main__":
    print(_try(json.load(sys.stdin)))
