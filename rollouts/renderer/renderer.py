"""Messages to tokens and back, from the tokenizer's own chat template.

Invariant: text is encoded once, when it enters the conversation; the ids of the history and of what the model sampled
are never made again. An opening is the template's own rendering, a bridge is what the template writes between a reply
and the next, and a bridge costs the same however long the history is. A renderer never changes (its counters aside) and
may be used from many threads.

It does not know who sampled, what is trained, or what the messages mean.
"""

from __future__ import annotations

import collections
import concurrent.futures
import datetime
import functools
import operator
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from rollouts.dtypes import Message, TokenColumn, Tool
from rollouts.errors import ConfigError
from rollouts.renderer.bridge import STRATEGIES, bridge_text, closes_turns
from rollouts.renderer.call_check import Calls, Reader, dialect_reads
from rollouts.renderer.history_diff import rewriting, shared
from rollouts.renderer.reply_text import opens_thought
from rollouts.renderer.selftest import SelfTest, run_self_test
from rollouts.renderer.template import ChatTemplate
from rollouts.renderer.tokenizer import Codec, load_tokenizer, stop_ids_of, vocab_size_of
from rollouts.tool_calls import DIALECTS, Dialect, dialect_of_template, get_dialect

__all__ = ["Renderer", "renderer_for"]

_OPENINGS_KEPT = 512
_PROBE = Tool("probe", "Probes.", {"type": "object", "properties": {"x": {"type": "string", "description": "Any."}}})
_SYSTEM = "You are a careful assistant."


class Renderer:
    """One tokenizer with one chat template.

    Args:
        tokenizer: a transformers tokenizer; it is read here and not kept.
        chat_template: template text, or the name of one of the tokenizer's templates; by default the tokenizer's own.
        stop_token_ids: ids that end a turn; by default those of the tokenizer's generation_config.json, and its EOS.
        dialect: how tool calls are written, by name or as an object; by default what the template teaches. ``"plain"``
            starts runs with tools whose calls are not read.
        template_kwargs: the template's switches, e.g. ``{"enable_thinking": False}``.
        strategy: how bridges build their dummy, a name of ``STRATEGIES``; by default the first that passes the test.
        moment: the time that a template is told; by default now, and then for the life of the renderer.
        tells_tools: whether the template is told of the tools; if not, the conversation's own words have to.

    Raises:
        ConfigError: there is no template, no stop token, or no such dialect.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template: str | None = None,
        stop_token_ids: Iterable[int] | None = None,
        dialect: str | Dialect | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        strategy: str | None = None,
        moment: datetime.datetime | None = None,
        tells_tools: bool = True,
    ) -> None:
        self.name = str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
        source = _template_source(tokenizer, chat_template, self.name)
        self._template = ChatTemplate(
            source,
            name=self.name,
            variables={**tokenizer.special_tokens_map, **(template_kwargs or {})},
            moment=moment or datetime.datetime.now(),
            tells_tools=tells_tools,
        )
        self._codec = Codec(tokenizer)
        self.stop_token_ids: tuple[int, ...] = (
            stop_ids_of(tokenizer) if stop_token_ids is None else tuple(dict.fromkeys(int(i) for i in stop_token_ids))
        )
        if not self.stop_token_ids:
            raise ConfigError.of("stop_token_ids", (), f"at least one; the tokenizer {self.name!r} has no EOS token")
        self._stops = tuple(self._codec.decode([stop]) for stop in self.stop_token_ids)
        self._special = frozenset(self.stop_token_ids) | _special_ids(tokenizer)
        self.vocab_size: int = vocab_size_of(tokenizer)
        """Number of ids of the model: no id at or above it may be sent."""
        name = dialect_of_template(source) if dialect is None else dialect
        self.dialect: Dialect = get_dialect(name) if isinstance(name, str) else name
        if strategy is not None and strategy not in STRATEGIES:
            raise ConfigError.of("strategy", strategy, f"one of {', '.join(STRATEGIES)}")
        self._given_strategy = strategy
        self._lock = threading.Lock()
        self._openings: collections.OrderedDict[object, concurrent.futures.Future[TokenColumn]] = (
            collections.OrderedDict()
        )
        self._self_tests: dict[object, SelfTest] = {}
        self._calls_are_text = dialect is not None and self.dialect.name == "plain"
        self._read_calls: dict[str, tuple[Calls, str]] = {}
        self._tools: tuple[tuple[Tool, ...], str] = ((), "()")

    def __repr__(self) -> str:
        stops = ", ".join(f"{i} {text!r}" for i, text in zip(self.stop_token_ids, self._stops, strict=True))
        return f"<Renderer {self._template.name}, dialect {self.dialect.name}, stops at {stops}>"

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The stop tokens as text, in the order of their ids."""
        return self._stops

    @property
    def encoded_tokens(self) -> int:
        """Tokens encoded so far for openings and bridges."""
        return self._codec.encoded_tokens

    @property
    def encoded_characters(self) -> int:
        """Characters encoded so far for openings and bridges."""
        return self._codec.encoded_characters

    # -- messages to tokens -------------------------------------------------------------------------------------------

    def opening(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> TokenColumn:
        """Ids of the messages that open a conversation, up to where the model begins; int32, read-only.

        The same messages and tools are rendered once, also when several threads ask at the same time.

        Raises:
            ConfigError: the template cannot render these messages.
        """
        # Arguments of calls are compared as they are written: True is not 1 to a template.
        called = any(message.tool_calls for message in messages)
        key = (repr(tuple(messages)) if called else tuple(messages), self._described(tools))
        with self._lock:
            known = self._openings.get(key)
            if known is not None:
                self._openings.move_to_end(key)
            else:
                mine = self._openings[key] = concurrent.futures.Future()
                if len(self._openings) > _OPENINGS_KEPT:
                    self._openings.popitem(last=False)
        if known is not None:
            return known.result()
        try:
            text = self._template.render(messages, tools)
            mine.set_result(self._codec.encode(text, opening=True))
        except BaseException as error:  # noqa: BLE001 - whoever waits for this opening gets it too
            with self._lock:
                self._openings.pop(key, None)
            mine.set_exception(error)
        return mine.result()

    def _described(self, tools: Sequence[Tool]) -> str:
        """All that there is to know of the tools, which are the same again and again."""
        held, text = self._tools
        if len(held) != len(tools) or not all(map(operator.is_, held, tools)):
            held, text = self._tools = tuple(tools), repr(tuple(tools))
        return text

    def forget(self) -> None:
        """Keep no opening and no word, as if nothing had been rendered yet."""
        with self._lock:
            self._openings.clear()
        self._codec.forget()

    def bridge(
        self,
        history: Sequence[Message],
        new: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        tail: Sequence[int] | TokenColumn,
    ) -> TokenColumn:
        """Ids between the last sampled id and the next one to sample; int32, read-only.

        The turn's closing mark is among them exactly if the model did not sample a stop token itself (the reply was
        cut). Where the model stopped with another mark than the template writes, the sampled one stands.

        Args:
            history: the conversation so far, ending in the reply; only its system messages and its last turn are read.
            new: everything that happened since, at once: all tool results of the step, or user messages.
            tools: the same as at the opening.
            tail: the reply's sampled ids; the last one is enough.

        Raises:
            ConfigError: ``new`` is empty, or the template cannot render it.
        """
        if not new:
            raise ConfigError.of("bridge.new", (), "at least one message; without one there is nothing to reply to")
        strategy = STRATEGIES[self._strategy]
        text = bridge_text(self._template, strategy, history, new, tools, self._stops)
        for message in new:
            # Some templates gather system messages at the front of the conversation, where they come too late.
            if message.role == "system" and message.content.strip() not in text:
                raise ConfigError.of(
                    "bridge.new", message, f"no system message; template {self._template.name} moves it"
                )
        ids = self._codec.encode(text)
        last = int(tail[-1]) if len(tail) else None
        return ids[1:] if self._is_spent(ids, last) else ids

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, generation_prompt: bool = True) -> str:
        """The whole conversation as the template writes it, up to where the model begins. Costs what it is long.

        Raises:
            ConfigError: the template cannot render these messages.
        """
        return self._template.render(messages, tools, generation_prompt=generation_prompt)

    def encode(self, text: str) -> TokenColumn:
        """Ids of a text that the template wrote; int32, read-only."""
        return self._codec.encode(text)

    def rewriting(
        self,
        before: str,
        after: str,
        history: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        sampled: Sequence[int] | TokenColumn = (),
    ) -> tuple[str, int]:
        """Whether the template writes the history anew, and how many ids it gives to what is new.

        Args:
            before: what :meth:`render` wrote up to where the last reply began.
            after: what it writes of ``history`` and ``new``.
            history: the conversation so far, ending in the reply.
            new: everything that happened since.
            tools: the tools.
            sampled: the reply's ids.

        Returns:
            The reason, ``""`` where nothing is rewritten; and the ids of ``new`` with its marks and the next header.
        """
        text = bridge_text(self._template, STRATEGIES[self._strategy], history, new, tools, self._stops)
        ids = self._codec.encode(text, counted=False)
        if not after.endswith(text):
            end = shared(after[::-1], text[::-1])
            return f"history rewritten: {text[: -end or None][-30:]!r} became {after[: -end or None][-30:]!r}", len(ids)
        stopped = len(sampled) > 0 and int(sampled[-1]) in self.stop_token_ids
        kept = self.decode(sampled[:-1] if stopped else sampled)
        closing = getattr(self.dialect, "reasoning", ("", ""))[1]
        why = rewriting(before, after.removesuffix(text), history[-1], kept=kept, closing=closing)
        return why, len(ids)

    def _is_spent(self, ids: TokenColumn, last: int | None) -> bool:
        """Whether the bridge's first id is one that the sampled stop token already stands for."""
        if not len(ids) or last not in self.stop_token_ids:
            return False
        first = int(ids[0])
        return first == last or (self._closes_turns and first in self._special)

    @functools.cached_property
    def _closes_turns(self) -> bool:
        return closes_turns(self._template)

    @functools.cached_property
    def _strategy(self) -> str:
        if self._given_strategy is not None:
            return self._given_strategy
        tried = {name: self._tested(name, (_PROBE,), None).verdict for name in STRATEGIES}
        return next((name for name, verdict in tried.items() if verdict != "refused"), next(iter(STRATEGIES)))

    # -- tokens to messages -------------------------------------------------------------------------------------------

    def decode(self, tokens: Sequence[int] | TokenColumn) -> str:
        """Text of ids, special tokens written out."""
        return self._codec.decode(tokens)

    def parse(
        self,
        tokens: Sequence[int] | TokenColumn,
        *,
        tools: Sequence[Tool] = (),
        prompt: Sequence[int] | TokenColumn | None = None,
    ) -> Message:
        """Read a reply: content, reasoning and tool calls. Never raises on what a model wrote.

        Args:
            tokens: the sampled ids, with or without their stop token.
            tools: what the model was told of.
            prompt: the ids before the reply, or their end; they tell whether the prompt opened a thinking block.
                Without them, a reply that never closes such a block is read as content.
        """
        stopped = len(tokens) > 0 and int(tokens[-1]) in self.stop_token_ids
        text = self.decode(tokens[:-1] if stopped else tokens)
        opened = None if prompt is None else opens_thought(self.decode(prompt[-8:]))
        reply = self.dialect.parse(text, tools=tools, reasoning_open=opened)
        return Message("assistant", reply.content, tool_calls=reply.tool_calls, reasoning=reply.reasoning)

    # -- the start-up test --------------------------------------------------------------------------------------------

    def self_test(self, tools: Sequence[Tool] = (), system: str | None = _SYSTEM) -> SelfTest:
        """Compare bridges with the template's own rendering of a synthetic conversation.

        Steps with tools are tested when there are tools. A template that takes no system prompt is tested without one,
        unless one is given. With tools it has to read the calls that the template writes, or ``dialect="plain"`` was
        given. The result is remembered for the same arguments.
        """
        key = (self._described(tools), system)
        found = self._self_tests.get(key)
        if found is None:
            found = self._tested(self._strategy, tools, system)
            if found.steps[0].verdict == "refused" and system is _SYSTEM:
                without = self._tested(self._strategy, tools, None)
                if without.steps[0].verdict != "refused":
                    note = f"no system prompt is taken: {found.steps[0].reason}"
                    found = attrs.evolve(without, notes=(note, *without.notes))
            if tools:
                found = self._with_calls(found, [tool.name for tool in tools])
            self._self_tests[key] = found
        return found

    def _tested(self, strategy: str, tools: Sequence[Tool], system: str | None) -> SelfTest:
        encode = functools.partial(self._codec.encode, counted=False)
        return run_self_test(self._template, (strategy, STRATEGIES[strategy]), encode, self._stops, tools, system)

    def _with_calls(self, found: SelfTest, names: Sequence[str]) -> SelfTest:
        """The verdict on the calls of these tools, with the ways out where they are not read."""
        if self._calls_are_text:
            return attrs.evolve(found, calls="not read", notes=(*found.notes, 'tool calls are text: dialect="plain"'))
        for name in names:
            if name not in self._read_calls:
                self._read_calls[name] = self._reads(self.dialect, name)
        verdicts = [self._read_calls[name] for name in names]
        unread = next((number for number, (calls, _) in enumerate(verdicts) if calls == "not read"), None)
        if unread is None:
            return attrs.evolve(found, calls="one a turn" if ("one a turn", "") in verdicts else "read")
        others = [each for each in DIALECTS.values() if self._reads(each, names[unread])[0] != "not read"]
        known = " or ".join(f'dialect="{each.name}"' for each in others)
        ways = [f"{known} reads them"] if known else ["give a chat_template whose calls a dialect reads"]
        ways.append('dialect="plain" starts without reading calls')
        why = f"dialect {self.dialect.name!r} does not read the tool calls of the environment: {verdicts[unread][1]}"
        return attrs.evolve(found, calls="not read", unread="; ".join([why, *ways]))

    def _reads(self, dialect: Dialect, name: str) -> tuple[Calls, str]:
        def respell(text: str) -> str:
            return self.decode(self._codec.encode(text, counted=False))

        return dialect_reads(Reader(self.render, self._stops, respell, dialect), name)


def _is_refused_at_once(found: SelfTest) -> bool:
    return found.steps[0].verdict == "refused"


def _template_source(tokenizer: Any, given: str | None, name: str) -> str:
    own = getattr(tokenizer, "chat_template", None)
    if isinstance(own, Mapping):
        wanted = "default" if given is None else given
        if wanted in own:
            return str(own[wanted])
        if given is None:
            raise ConfigError.of("chat_template", None, f"the name of a template of {name!r}: {', '.join(sorted(own))}")
    source = given or own
    if not isinstance(source, str) or not source:
        raise ConfigError.of("chat_template", source, f"template text: the tokenizer {name!r} brings none")
    return source


def _special_ids(tokenizer: Any) -> frozenset[int]:
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(tokenizer.all_special_ids) | {i for i, token in added.items() if token.special}


_SHARED: weakref.WeakKeyDictionary[Any, dict[str, Renderer]] = weakref.WeakKeyDictionary()
_SHARED_LOCK = threading.Lock()
_loaded = functools.lru_cache(maxsize=8)(load_tokenizer)


def renderer_for(tokenizer: Any, **kwargs: Any) -> Renderer:
    """The shared renderer of a tokenizer, or of a path or name to load one from; ``kwargs`` as for :class:`Renderer`.

    It lives as long as its tokenizer; tokenizers that are loaded here are kept. A renderer is given back as it is.

    Raises:
        ConfigError: the tokenizer does not load, or :class:`Renderer` refuses it.
    """
    kwargs = {name: value for name, value in kwargs.items() if value is not None}
    if isinstance(tokenizer, Renderer):
        for name, value in kwargs.items():
            raise ConfigError.of(name, value, f"nothing: the renderer {tokenizer!r} is given, which has its own")
        return tokenizer
    key = repr(sorted(kwargs.items()))
    with _SHARED_LOCK:
        if isinstance(tokenizer, str | Path):
            tokenizer = _loaded(tokenizer)
        shared = _SHARED.setdefault(tokenizer, {})
        if key not in shared:
            shared[key] = Renderer(tokenizer, **kwargs)
        return shared[key]
