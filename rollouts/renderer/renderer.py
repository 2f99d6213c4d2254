"""Conversion between messages and tokens with the tokenizer's chat template.

Invariant: text is encoded once, when it enters the conversation; ids of the history and sampled ids are never encoded
again. An opening is the template's own rendering. A bridge is the text that the template writes between two replies;
its cost does not depend on the length of the history. A renderer is thread-safe; only its caches and counters change.

This module does not know the policy, the loss mask, or the meaning of messages.
"""

from __future__ import annotations

import collections
import concurrent.futures
import datetime
import functools
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import attrs

from rollouts.dtypes import Image, ImageSpan, Message, TokenColumn, Tool, packed_tokens
from rollouts.errors import ConfigError
from rollouts.renderer.bridge import STRATEGIES, bridge_text, closes_turns, whole, with_kept
from rollouts.renderer.call_check import Calls, Reader, dialect_reads
from rollouts.renderer.dialects import DIALECTS, Dialect, dialect_of_template, get_dialect, parse_stopped, thought_marks
from rollouts.renderer.history_diff import rewriting, shared
from rollouts.renderer.images import ImageProcessor, example_images, load_processor
from rollouts.renderer.memory import BridgeMemory
from rollouts.renderer.prefill import goes_on, open_turn, turn_start
from rollouts.renderer.reply_text import opens_thought
from rollouts.renderer.selftest import SelfTest, Step, run_image_steps, run_self_test
from rollouts.renderer.special_text import GUARD, Marks, SpecialText
from rollouts.renderer.switches import Switches
from rollouts.renderer.template import ChatTemplate
from rollouts.renderer.tokenizer import Codec, load_tokenizer, stop_ids_of, vocab_size_of

__all__ = ["Renderer", "images_of", "renderer_for"]

_OPENINGS_KEPT = 512
_RESULTS_KEPT = 1024
"""Results of self-tests: an environment may have other tools for each prompt."""
_CHECKED_TEXT = 1000
"""Characters at each end of a long text that are rendered for a bridge."""
_SHORT_HISTORY = 6
"""Messages of a history that is rendered whole for a bridge: a dummy has hardly fewer."""
_PROBE = Tool("probe", "Probes.", {"type": "object", "properties": {"x": {"type": "string", "description": "Any."}}})
_SYSTEM = "You are a careful assistant."


class Renderer:
    """A tokenizer with one chat template: openings, bridges, parsing and the self-test.

    Args:
        tokenizer: a transformers tokenizer; read during construction, not stored.
        chat_template: template text, the name of one of the tokenizer's templates, or the path of a file; by default
            the tokenizer's own.
        stop_token_ids: ids that end a turn; by default those of the tokenizer's generation_config.json, and its EOS.
        dialect: the notation of tool calls, by name or as an object; by default, found in the template. With
            ``"plain"``, tool calls are not parsed, and runs with tools start anyway.
        template_kwargs: variables that the template reads, e.g. ``{"enable_thinking": False}``.
        strategy: how bridges build their dummy, a name of ``STRATEGIES``; by default the first that passes the test.
        moment: the time that the template gets from ``strftime_now``; by default the time of construction.
        tells_tools: whether the template gets the tools; if not, the messages must describe them.
        special_text: what happens to special tokens, and other added tokens that the template writes, in the text of
            user and tool messages. ``"as_ids"``: they become their ids, as in transformers and in servers' chat
            endpoints, so that prompts are those that the model is served with. ``"as_text"``: they are encoded as
            plain text, each apart, so that a web page or a user cannot write the marks of a turn. ``"error"``: they
            are refused.
        images: the model's processor, which transformers' ``AutoProcessor`` loads: messages may have images.
            ``True`` loads it from where the tokenizer comes from, a path or a name from there. By default images are
            refused.

    Raises:
        ConfigError: there is no template or no stop token, the dialect or the strategy is unknown, the template
            never reads a variable of ``template_kwargs``, or the processor does not load or fit the template.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template: str | Path | None = None,
        stop_token_ids: Iterable[int] | None = None,
        dialect: str | Dialect | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        strategy: str | None = None,
        moment: datetime.datetime | None = None,
        tells_tools: bool = True,
        special_text: SpecialText = "as_ids",
        images: Any = False,
    ) -> None:
        self.name = str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
        source = _template_source(tokenizer, chat_template, self.name)
        self._template = ChatTemplate(
            source,
            name=self.name,
            variables={**tokenizer.special_tokens_map, **(template_kwargs or {})},
            moment=moment or datetime.datetime.now(),
            tells_tools=tells_tools,
            shows_images=bool(images),
        )
        _check_read(self._template, template_kwargs or {}, tokenizer.special_tokens_map)
        self._codec = Codec(tokenizer)
        self.stop_token_ids: tuple[int, ...] = (
            stop_ids_of(tokenizer) if stop_token_ids is None else tuple(dict.fromkeys(int(i) for i in stop_token_ids))
        )
        if not self.stop_token_ids:
            raise ConfigError.of("stop_token_ids", (), f"at least one; the tokenizer {self.name!r} has no EOS token")
        self._stops = tuple(self._codec.decode([stop]) for stop in self.stop_token_ids)
        self._special = frozenset(self.stop_token_ids) | _special_ids(tokenizer)
        self.vocab_size: int = vocab_size_of(tokenizer)
        """Number of token ids of the model; every id in a request must be lower."""
        name = dialect_of_template(source) if dialect is None else dialect
        self.dialect: Dialect = get_dialect(name) if isinstance(name, str) else name
        if special_text not in get_args(SpecialText):
            raise ConfigError.of("special_text", special_text, f"one of {', '.join(get_args(SpecialText))}")
        self.special_text: SpecialText = special_text
        self._marks = Marks(_marks_of(tokenizer, source, self._stops), special_text)
        if strategy is not None and strategy not in STRATEGIES:
            raise ConfigError.of("strategy", strategy, f"one of {', '.join(STRATEGIES)}")
        self._given_strategy = strategy
        self._lock = threading.Lock()
        self._openings: collections.OrderedDict[object, concurrent.futures.Future[TokenColumn]] = (
            collections.OrderedDict()
        )
        self._self_tests: dict[object, SelfTest] = {}
        self._calls_are_text = dialect is not None and self.dialect.name == "plain"
        self._switches = Switches(self._template, self._stops)
        self._read_calls: dict[str, tuple[Calls, str]] = {}
        self.images: ImageProcessor | None = None
        """The image processor; ``None`` if messages must not have images."""
        if images:
            source = self.name if images is True else images
            processor = load_processor(str(source)) if isinstance(source, str | Path) else source
            encode = functools.partial(self._codec.encode, counted=False)
            self.images = ImageProcessor(processor, self._written_for_an_image(), encode, self._codec.decode)

    def _written_for_an_image(self) -> str:
        return self._template.render([Message("user", (next(example_images()),))])

    def __repr__(self) -> str:
        stops = ", ".join(f"{i} {text!r}" for i, text in zip(self.stop_token_ids, self._stops, strict=True))
        return f"<Renderer {self._template.name}, dialect {self.dialect.name}, stops at {stops}>"

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The stop tokens as text, in the order of ``stop_token_ids``."""
        return self._stops

    def fingerprints(self) -> dict[str, dict[str, Any]]:
        """Checksums of the template with its variables, and of the tokenizer; equal wherever both are equal."""
        return {
            "template": {"text": f"{self._template.fingerprint:08x}", "dialect": self.dialect.name},
            "tokenizer": {"text": f"{self._codec.fingerprint():08x}", "stop_token_ids": list(self.stop_token_ids)},
            **({"images": {"text": f"{self.images.fingerprint():08x}"}} if self.images is not None else {}),
        }

    @property
    def template_variables(self) -> frozenset[str]:
        """The variables that the chat template reads: the names that ``template_kwargs`` may have."""
        return self._template.reads

    @property
    def encoder(self) -> str:
        """The library that encodes: ``"fastokens"``, ``"tokenizers"``, or ``"transformers"`` for a slow tokenizer."""
        return self._codec.encoder

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
        """Return the ids of the first prompt of a conversation, up to the first reply; int32, read-only.

        If the last message is an assistant message, the reply goes on in its turn: the prompt ends with its content.
        Equal messages and tools are rendered once, also when several threads call at the same time.

        Raises:
            ConfigError: the template cannot render these messages, or cannot go on in the last one.
        """
        # Arguments are compared by repr: True == 1 in Python, but a template writes them differently. The repr of an
        # image has its hash, so that the cache does not keep its bytes.
        called = any(message.tool_calls or message.images for message in messages)
        key = (repr(tuple(messages)) if called else tuple(messages), self._template.key_of(tools))
        with self._lock:
            cached = self._openings.get(key)
            if cached is not None:
                self._openings.move_to_end(key)
            else:
                future = self._openings[key] = concurrent.futures.Future()
                if len(self._openings) > _OPENINGS_KEPT:
                    self._openings.popitem(last=False)
        if cached is not None:
            return cached.result()
        try:
            text = self._opening_text(messages, tools)
            future.set_result(self._encode(text, images_of(messages)))
        except BaseException as error:  # noqa: BLE001 - threads that wait for this opening get the error too
            with self._lock:
                self._openings.pop(key, None)
            future.set_exception(error)
        return future.result()

    def _opening_text(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        messages = self._marks.guarded(messages)
        if goes_on(messages):
            return open_turn(self._template, messages, tools)
        return self._template.render(messages, tools)

    def check_images(self, messages: Sequence[Message]) -> None:
        """Refuse images where there is no image processor.

        Raises:
            ConfigError: a message has an image.
        """
        for message in messages if self.images is None else ():
            message.only_text(f"the renderer of chat template {self._template.name}")

    def image_spans(self, tokens: TokenColumn, messages: Sequence[Message]) -> tuple[ImageSpan, ...]:
        """The positions of the images of messages in the ids that :meth:`opening`, :meth:`bridge` or
        :meth:`encode_conversation` returned for them.

        Raises:
            ConfigError: the ids have another number of image tokens.
        """
        return () if self.images is None else self.images.spans(tokens, images_of(messages))

    def reply_start(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> int:
        """Return the number of ids of an opening before the first reply's turn.

        That is all of them, unless the last message is an assistant message: its text is the start of the reply.

        Raises:
            ConfigError: as :meth:`opening`.
        """
        opening = self.opening(messages, tools)
        if not goes_on(messages):
            return len(opening)
        text = self._opening_text(messages, tools)
        opened, _ = thought_marks(self.dialect)
        start = turn_start(self._template, self._marks.guarded(messages), tools, text, opened)
        before = self._encode(text[:start], images_of(messages), counted=False, partly=True)
        return shared(before.tolist(), opening.tolist())

    def forget(self) -> None:
        """Clear the cache of openings."""
        with self._lock:
            self._openings.clear()

    def bridge(
        self,
        history: Sequence[Message],
        new: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        tail: Sequence[int] | TokenColumn,
        memory: BridgeMemory | None = None,
    ) -> TokenColumn:
        """Return the ids between a reply and the next one; int32, read-only.

        They begin with the turn's closing mark only if the model sampled no stop token (the reply was cut). If the
        model sampled another stop token than the template writes, the sampled one stays.

        In a conversation of at most six messages so far, it is what the template writes there (long texts shortened).
        In a longer one a dummy stands in place of the history. The bridges 1, 2, 4, 8, … from there on, and those after
        a message that contains a switch of the template (such as ``/no_think``), are compared with the rendering of the
        whole conversation. Of many messages with the same switches, the 1st, 2nd, 4th, 8th, … count.

        Args:
            history: the conversation so far, ending with the reply. Of the earlier messages of a longer one, only
                system messages and those that contain a switch are rendered.
            new: all messages since the reply: the tool results of the step, or user messages.
            tools: the tools of the opening.
            tail: the reply's sampled ids; the last one is enough.
            memory: what earlier bridges of the same ``history``, a list that grows, have found; without it, the whole
                history is searched for switches, and the bridge is compared.

        Raises:
            ConfigError: ``new`` is empty, the template cannot render it or leaves out one of its messages (some
                templates move system messages to the front), no stop token ends a turn of calls, the whole conversation
                is rendered with another text in the bridge's place, or the model sampled the placeholder of an image.
        """
        if not new:
            raise ConfigError.of("bridge.new", (), "at least one message; without one there is nothing to reply to")
        new = self._marks.guarded(new)
        images = images_of(new)
        if self.images is not None:
            self.images.check_sampled(tail)
        if len(history) <= _SHORT_HISTORY:
            text = self._whole_bridge_text(history, new, tools)
        else:
            memory = memory or BridgeMemory()
            text = self._bridge_text(history, new, tools, memory)
            if memory.compares(history[-1], new, self._switches) or images:
                self._check_bridge(text, history, new, tools)
        ids = self._encode(text, images)
        last = int(tail[-1]) if len(tail) else None
        return ids[1:] if self._replaces_first(last, ids) else ids

    def continuation(self, text: str) -> TokenColumn:
        """Return the ids of a text that goes on in a reply's turn, encoded alone; int32, read-only.

        Raises:
            ConfigError: it contains a special token, and ``special_text`` is ``"error"``.
        """
        return self._encode(self._marks.guarded_text(text, "StepResult.continuation"))

    def _bridge_text(
        self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool], memory: BridgeMemory
    ) -> str:
        strategy = with_kept(STRATEGIES[self._strategy], memory.read(history, self._switches, self._marks))
        return bridge_text(self._template, strategy, history, new, tools, self._stops)

    def _whole_bridge_text(self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool]) -> str:
        """The bridge in the rendering of the whole conversation, in which long texts without a switch are shortened.

        Raises:
            ConfigError: the template raises.
        """
        shown = self._marks.guarded([self._shortened(message) for message in history])
        reply = history[-1] if history else None
        if reply is not None and reply.role == "assistant" and not reply.text.strip() and not reply.tool_calls:
            self._template.render([*shown, *new], tools)  # some templates refuse an empty turn
        return bridge_text(self._template, whole, shown, new, tools, self._stops)

    def _check_bridge(
        self, text: str, history: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool]
    ) -> None:
        """Compare a bridge with that of the whole conversation.

        Raises:
            ConfigError: they differ in more than the mark that ends the reply, or the template raises.
        """
        written = self._whole_bridge_text(history, new, tools)
        if written == text or any(stop + written == text or stop + text == written for stop in self._stops):
            return
        at = max(shared(written, text) - 20, 0)
        raise ConfigError(
            f"chat template {self._template.name}: after this conversation it writes {written[at : at + 40]!r} where "
            f'the bridge has {text[at : at + 40]!r}; history="fork" renders the whole conversation for each reply'
        )

    def _shortened(self, message: Message) -> Message:
        """The message without the middle of a long text, unless it contains a switch."""
        if len(message.text) <= 2 * _CHECKED_TEXT or self._switches.found(message):
            return message
        return message.with_texts(_shortened_text)

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, generation_prompt: bool = True) -> str:
        """Render the whole conversation, up to the next reply. The cost is proportional to its length.

        Raises:
            ConfigError: the template cannot render these messages.
        """
        return self._template.render(messages, tools, generation_prompt=generation_prompt).replace(GUARD, "")

    def encode(self, text: str) -> TokenColumn:
        """Return the ids of a text that the template wrote; int32, read-only."""
        return self._codec.encode(text)

    def encode_conversation(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, rendered: str
    ) -> TokenColumn:
        """Return the ids of a whole conversation; ``rendered`` is the result of :meth:`render`.

        Raises:
            ConfigError: as :meth:`opening`.
        """
        guarded = self._marks.guarded(messages)
        text = rendered if guarded is messages else self._template.render(guarded, tools)
        return self._encode(text, images_of(messages))

    def _encode(
        self, text: str, images: Sequence[Image] = (), *, counted: bool = True, partly: bool = False
    ) -> TokenColumn:
        """Encode a text with guards: the marks that they break are plain text. Placeholders are expanded.

        ``partly``: the text is the start of a rendering, with the first of its images.
        """
        if self.images is not None:
            images = images[: text.count(self.images.placeholder)] if partly else images
            text = self.images.expanded(text, images)
        if GUARD not in text:
            return self._codec.encode(text, counted=counted)
        ids: list[int] = []
        for part, plain in self._marks.parts(text):
            ids += self._codec.encode_plain(part) if plain else self._codec.encode(part, counted=counted).tolist()
        return packed_tokens(ids)

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
        """Check whether the template rewrites the history, and count the ids of the new messages.

        Args:
            before: the result of :meth:`render` for the prompt of the last reply.
            after: the result of :meth:`render` for ``history`` and ``new``.
            history: the conversation so far, ending with the reply.
            new: all messages since the reply.
            tools: the tools.
            sampled: the reply's ids.

        Returns:
            The reason, ``""`` if nothing is rewritten; and the number of ids of ``new`` with marks and next header.
        """
        new = self._marks.guarded(new)
        text = self._bridge_text(history, new, tools, BridgeMemory())
        ids = self._encode(text, images_of(new), counted=False)
        text = text.replace(GUARD, "")
        if not after.endswith(text):
            end = shared(after[::-1], text[::-1])
            return f"history rewritten: {text[: -end or None][-30:]!r} became {after[: -end or None][-30:]!r}", len(ids)
        stopped = len(sampled) > 0 and int(sampled[-1]) in self.stop_token_ids
        kept = self.decode(sampled[:-1] if stopped else sampled)
        closing = getattr(self.dialect, "reasoning", ("", ""))[1]
        why = rewriting(before, after.removesuffix(text), history[-1], kept=kept, closing=closing)
        return why, len(ids)

    def _replaces_first(self, last: int | None, ids: TokenColumn) -> bool:
        """Whether the sampled stop token replaces the first id of the bridge."""
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
        verdicts = {name: self._run_self_test(name, (_PROBE,), None).verdict for name in STRATEGIES}
        return next((name for name, verdict in verdicts.items() if verdict != "refused"), next(iter(STRATEGIES)))

    # -- tokens to messages -------------------------------------------------------------------------------------------

    def decode(self, tokens: Sequence[int] | TokenColumn) -> str:
        """Return the text of ids, including special tokens."""
        return self._codec.decode(tokens)

    def parse(
        self,
        tokens: Sequence[int] | TokenColumn,
        *,
        tools: Sequence[Tool] = (),
        prompt: Sequence[int] | TokenColumn | None = None,
    ) -> Message:
        """Parse a reply into content, reasoning and tool calls. Never raises because of what the model sampled.

        Args:
            tokens: the sampled ids, with or without their stop token.
            tools: the tools of the prompt.
            prompt: the ids before the reply, or the last of them; used to see whether the prompt opened a thinking
                block. Without them, a reply that never closes such a block is parsed as content.
        """
        stopped = len(tokens) > 0 and int(tokens[-1]) in self.stop_token_ids
        text, stop = (self.decode(tokens[:-1]), self.decode(tokens[-1:])) if stopped else (self.decode(tokens), "")
        opened = None if prompt is None else opens_thought(self.decode(prompt[-8:]), thought_marks(self.dialect)[0])
        reply = parse_stopped(self.dialect, text, stop, tools=tools, reasoning_open=opened)
        return Message("assistant", reply.content, tool_calls=reply.tool_calls, reasoning=reply.reasoning)

    # -- the start-up test --------------------------------------------------------------------------------------------

    def self_test(self, tools: Sequence[Tool] = (), system: str | None = _SYSTEM) -> SelfTest:
        """Compare bridges with the template's own rendering of a synthetic conversation.

        With tools, the steps with tool calls are tested too, and the dialect must read the calls that the template
        writes, unless ``dialect="plain"`` was given. If the template refuses the default system prompt, the test runs
        without one. Results are cached by arguments.
        """
        key = (self._template.key_of(tools), system)
        result = self._self_tests.get(key)
        if result is None:
            _ = self._switches.texts  # found here, not while the first bridge is awaited
            result = self._run_self_test(self._strategy, tools, system)
            if result.steps[0].verdict == "refused" and system is _SYSTEM:
                without = self._run_self_test(self._strategy, tools, None)
                if without.steps[0].verdict != "refused":
                    note = f"the template takes no system prompt: {result.steps[0].reason}"
                    result = attrs.evolve(without, notes=(note, *without.notes))
            if self.images is not None:
                result = attrs.evolve(result, steps=(*result.steps, *self._image_steps(self.images, tools)))
            if tools:
                result = self._with_calls(result, [tool.name for tool in tools])
            self._self_tests[key] = result
            _drop_oldest(self._self_tests)
        return result

    def _image_steps(self, images: ImageProcessor, tools: Sequence[Tool]) -> Iterator[Step]:
        encode = functools.partial(self._codec.encode, counted=False)
        strategy = STRATEGIES[self._strategy]
        return run_image_steps(self._template, strategy, encode, self._stops, images, tools)

    def _run_self_test(self, strategy: str, tools: Sequence[Tool], system: str | None) -> SelfTest:
        encode = functools.partial(self._codec.encode, counted=False)
        return run_self_test(self._template, (strategy, STRATEGIES[strategy]), encode, self._stops, tools, system)

    def _with_calls(self, result: SelfTest, names: Sequence[str]) -> SelfTest:
        """Add the verdict on the calls of these tools; if they are not read, also the remedies."""
        if self._calls_are_text:
            return attrs.evolve(result, calls="not read", notes=(*result.notes, 'tool calls are text: dialect="plain"'))
        for name in names:
            if name not in self._read_calls:
                self._read_calls[name] = self._reads(self.dialect, name)
        verdicts = [self._read_calls[name] for name in names]
        _drop_oldest(self._read_calls)
        unread = next((number for number, (calls, _) in enumerate(verdicts) if calls == "not read"), None)
        if unread is None:
            return attrs.evolve(result, calls="one a turn" if ("one a turn", "") in verdicts else "read")
        others = [each for each in DIALECTS.values() if self._reads(each, names[unread])[0] != "not read"]
        options = " or ".join(f'dialect="{each.name}"' for each in others)
        remedies = [f"{options} reads them"] if options else ["give a chat_template whose calls a dialect reads"]
        remedies.append('dialect="plain" starts without reading calls')
        why = f"dialect {self.dialect.name!r} does not read the tool calls of the environment: {verdicts[unread][1]}"
        return attrs.evolve(result, calls="not read", unread="; ".join([why, *remedies]))

    def _reads(self, dialect: Dialect, name: str) -> tuple[Calls, str]:
        def respell(text: str) -> str:
            return self.decode(self._codec.encode(text, counted=False))

        return dialect_reads(Reader(self.render, self._stops, respell, dialect), name)


def images_of(messages: Iterable[Message]) -> list[Image]:
    """The images of messages, in their order."""
    return [image for message in messages for image in message.images]


def _shortened_text(text: str) -> str:
    return text if len(text) <= 2 * _CHECKED_TEXT else text[:_CHECKED_TEXT] + text[-_CHECKED_TEXT:]


def _drop_oldest(results: dict[Any, Any]) -> None:
    while len(results) > _RESULTS_KEPT:
        results.pop(next(iter(results)), None)


def _check_read(template: ChatTemplate, given: Mapping[str, Any], special: Mapping[str, Any]) -> None:
    """Refuse variables that have no effect, e.g. a mistyped ``enable_thinking``."""
    for name in given:
        if name not in template.reads:
            switches = ", ".join(sorted(template.reads - special.keys())) or "none"
            raise ConfigError.of("template_kwargs", name, f"a variable that {template.name} reads: {switches}")


def _template_source(tokenizer: Any, given: str | Path | None, name: str) -> str:
    if isinstance(given, Path):
        try:
            given = given.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError.of("chat_template", str(given), f"a file with a chat template ({error})") from error
    own = getattr(tokenizer, "chat_template", None)
    if isinstance(own, Mapping):
        chosen = "default" if given is None else given
        if chosen in own:
            return str(own[chosen])
        if given is None:
            raise ConfigError.of("chat_template", None, f"the name of a template of {name!r}: {', '.join(sorted(own))}")
    source = given or own
    if not isinstance(source, str) or not source:
        expected = f"template text (--chat-template FILE): the tokenizer {name!r} has no chat template"
        raise ConfigError.of("chat_template", source, expected)
    return source


def _special_ids(tokenizer: Any) -> frozenset[int]:
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(tokenizer.all_special_ids) | {i for i, token in added.items() if token.special}


def _marks_of(tokenizer: Any, source: str, stops: Sequence[str]) -> set[str]:
    """The texts of special tokens, and of other added tokens that the template writes."""
    added = {str(token.content): token.special for token in getattr(tokenizer, "added_tokens_decoder", {}).values()}
    marks = {text for text, special in added.items() if special or text in source}
    return marks | set(stops) | set(tokenizer.all_special_tokens)


_RENDERERS_KEPT = 64
"""For each tokenizer: prompts may have template variables of many values."""
_SHARED: weakref.WeakKeyDictionary[Any, dict[str, Renderer]] = weakref.WeakKeyDictionary()
_SHARED_LOCK = threading.Lock()
_loaded = functools.lru_cache(maxsize=8)(load_tokenizer)


def renderer_for(tokenizer: Any, **kwargs: Any) -> Renderer:
    """Return the shared renderer of a tokenizer, or of a path or name to load one from.

    ``kwargs`` are the options of :class:`Renderer`. A renderer lives as long as its tokenizer, and tokenizers that are
    loaded here are cached. A renderer as ``tokenizer`` is returned unchanged.

    Raises:
        ConfigError: the tokenizer does not load, :class:`Renderer` refuses it, or a renderer comes with ``kwargs``.
    """
    kwargs = {name: value for name, value in kwargs.items() if value is not None}
    if isinstance(tokenizer, Renderer):
        for name, value in kwargs.items():
            raise ConfigError.of(name, value, f"no value: the renderer {tokenizer!r} has its own")
        return tokenizer
    key = repr(sorted(kwargs.items()))
    with _SHARED_LOCK:
        if isinstance(tokenizer, str | Path):
            tokenizer = _loaded(tokenizer)
        shared = _SHARED.setdefault(tokenizer, {})
        renderer = shared.pop(key, None) or Renderer(tokenizer, **kwargs)
        shared[key] = renderer  # the last one used is the last one dropped
        if len(shared) > _RENDERERS_KEPT:
            del shared[next(iter(shared))]
        return renderer
