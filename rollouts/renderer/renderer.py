"""Conversion between messages and tokens with the tokenizer's chat template.

Invariant: text is encoded once, when it enters the conversation; ids of the history and sampled ids are never encoded
again. An opening is the template's own rendering. A bridge is the text that the template writes between two replies;
its cost does not depend on the length of the history. A renderer is thread-safe; only its caches and counters change.

:class:`Renderer` is the face of four parts: the model's format, openings, bridges and start-up tests. This module does
not know the policy, the loss mask, or the meaning of messages.
"""

from __future__ import annotations

import datetime
import functools
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollouts.dtypes import ImageSpan, Message, TokenColumn, Tool
from rollouts.errors import ConfigError
from rollouts.renderer.bridge_ids import Bridges
from rollouts.renderer.call_check import CallCheck, Reader
from rollouts.renderer.dialects import Dialect, parse_stopped, thought_marks
from rollouts.renderer.memory import BridgeMemory
from rollouts.renderer.model_format import ModelFormat, images_of
from rollouts.renderer.openings import Openings
from rollouts.renderer.reply_text import opens_thought
from rollouts.renderer.sampled_calls import usable_call
from rollouts.renderer.selftest import SelfTest
from rollouts.renderer.special_text import GUARD, SpecialText
from rollouts.renderer.startup_tests import SYSTEM, StartupTests
from rollouts.renderer.tokenizer import load_tokenizer, vocab_size_of

if TYPE_CHECKING:
    from rollouts.renderer.images import ImageProcessor

__all__ = ["Renderer", "renderer_for"]

_PROMPT_END = 16
"""Number of last prompt tokens that show how the prompt begins the reply."""


class Renderer:
    """A tokenizer with one chat template: openings, bridges, parsing and the self-test.

    Args:
        tokenizer: a transformers tokenizer; read during construction, not stored.
        chat_template: template text, the name of one of the tokenizer's templates, the path of a file, or a function in
            Python, as ``package.module:function`` or by its entry point; by default the tokenizer's own.
        stop_token_ids: ids that end a turn; by default those of the tokenizer's generation_config.json, and its EOS.
        dialect: the notation of tool calls, by name or as an object; by default, found in the template. With
            ``"plain"``, tool calls are not parsed, and runs with tools start anyway.
        template_kwargs: variables that the template reads, e.g. ``{"enable_thinking": False}``.
        calls: ``"checked"``: a run whose dialect does not read the calls that the template writes is refused.
            ``"unchecked"``: the dialect, which must be named, reads the replies all the same. For families whose
            template writes other calls into the history than the model samples.
        strategy: how bridges build their dummy, a name of ``STRATEGIES``; by default the first that passes the test.
        moment: the time that the template gets from ``strftime_now``; by default the time of construction.
        tells_tools: whether the template gets the tools; if not, the messages must describe them.
        special_text: the treatment of special tokens, and other added tokens that the template writes, in the text of
            user and tool messages. ``"as_ids"``: they become their ids, as in transformers and in servers' chat
            endpoints, so that training and serving have equal prompts. ``"as_text"``: they are encoded as plain text,
            each apart, so that a web page or a user cannot write the marks of a turn. ``"error"``: they are refused.
        images: the model's processor, which transformers' ``AutoProcessor`` loads: messages may have images.
            ``True`` loads it from where the tokenizer comes from, a path or a name from there. By default images are
            refused.

    Raises:
        ConfigError: there is no template or no stop token, the dialect or the strategy is unknown, calls are unchecked
            and no dialect is named, the template never reads a variable of ``template_kwargs``, or the processor does
            not load or fit the template.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template: str | Path | None = None,
        stop_token_ids: Iterable[int] | None = None,
        dialect: str | Dialect | None = None,
        calls: CallCheck = "checked",
        template_kwargs: Mapping[str, Any] | None = None,
        strategy: str | None = None,
        moment: datetime.datetime | None = None,
        tells_tools: bool = True,
        special_text: SpecialText = "as_ids",
        images: Any = False,
    ) -> None:
        self.name = str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
        self._model = ModelFormat.of(
            tokenizer,
            self.name,
            chat_template=chat_template,
            stop_token_ids=stop_token_ids,
            dialect=dialect,
            template_kwargs=template_kwargs or {},
            moment=moment or datetime.datetime.now(),
            tells_tools=tells_tools,
            special_text=special_text,
            images=images,
        )
        self.stop_token_ids: tuple[int, ...] = self._model.stop_ids
        self.vocab_size: int = vocab_size_of(tokenizer)
        """Number of token ids of the model; every id in a request must be lower."""
        self.dialect: Dialect = self._model.dialect
        self.special_text: SpecialText = special_text
        self.images: ImageProcessor | None = self._model.images
        """The image processor; ``None`` if messages must not have images."""
        self.calls: CallCheck = calls
        """Whether runs are refused whose calls the dialect would not read."""
        self._tests = StartupTests(self._model, strategy, named=dialect is not None, calls=calls)
        self._openings = Openings(self._model)
        self._bridges = Bridges(self._model, self._tests)

    def __repr__(self) -> str:
        stops = ", ".join(f"{i} {text!r}" for i, text in zip(self.stop_token_ids, self._model.stops, strict=True))
        return f"<Renderer {self._model.template.name}, dialect {self.dialect.name}, stops at {stops}>"

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The stop tokens as text, in the order of ``stop_token_ids``."""
        return self._model.stops

    def fingerprints(self) -> dict[str, dict[str, Any]]:
        """Checksums of the template with its variables, and of the tokenizer; equal wherever both are equal."""
        return {
            "template": {
                "text": f"{self._model.template.fingerprint:08x}",
                "dialect": self.dialect.name,
                **({"calls": self.calls} if self.calls != "checked" else {}),
            },
            "tokenizer": {
                "text": f"{self._model.codec.fingerprint():08x}",
                "stop_token_ids": list(self.stop_token_ids),
            },
            **({"images": {"text": f"{self.images.fingerprint():08x}"}} if self.images is not None else {}),
        }

    @property
    def template_variables(self) -> frozenset[str]:
        """The variables that the chat template reads: the names that ``template_kwargs`` may have."""
        return self._model.template.reads

    @property
    def encoder(self) -> str:
        """The library that encodes: ``"fastokens"``, ``"tokenizers"``, or ``"transformers"`` for a slow tokenizer."""
        return self._model.codec.encoder

    @property
    def encoded_tokens(self) -> int:
        """Tokens encoded so far for openings and bridges."""
        return self._model.codec.encoded_tokens

    # -- messages to tokens -------------------------------------------------------------------------------------------

    def opening(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, new_turn: bool = False
    ) -> TokenColumn:
        """Return the ids of the first prompt of a conversation, up to the first reply; int32, read-only.

        If the last message is an assistant message, the reply continues its turn, and the prompt ends with its content;
        unless ``new_turn`` is true.
        Equal messages and tools are rendered once, also when several threads call at the same time.

        Raises:
            ConfigError: the template cannot render these messages, or cannot continue the last one.
        """
        return self._openings.opening(messages, tools, new_turn)

    def check_images(self, messages: Sequence[Message]) -> None:
        """Refuse images where there is no image processor.

        Raises:
            ConfigError: a message has an image.
        """
        for message in messages if self.images is None else ():
            message.only_text(f"the renderer of chat template {self._model.template.name}")

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
        return self._openings.reply_start(messages, tools)

    def forget(self) -> None:
        """Clear the cache of openings."""
        self._openings.forget()

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

        In a conversation of at most six messages so far, the bridge is the text that the template writes there (long
        texts shortened). In a longer one a dummy stands in place of the history. The bridges 1, 2, 4, 8, … from there
        on, and those after a message that contains a switch of the template (such as ``/no_think``), are compared with
        the rendering of the whole conversation. Where many messages have the same switches, the bridges after the
        1st, 2nd, 4th, 8th, … are.

        Args:
            history: the conversation so far, ending with the reply. Of the earlier messages of a longer one, only
                system messages and messages with a switch are rendered.
            new: all messages since the reply: the tool results of the step, or user messages.
            tools: the tools of the opening.
            tail: the reply's sampled ids; the last one is enough, unless the renderer takes images.
            memory: the findings of earlier bridges of the same ``history``, a list that grows; without it, the whole
                history is searched for switches, and the bridge is compared.

        Raises:
            ConfigError: ``new`` is empty, the template cannot render it or leaves out one of its messages (some
                templates move system messages to the front), no stop token ends a turn of calls, the whole conversation
                is rendered with another text in the bridge's place, or the model sampled the placeholder of an image.
        """
        return self._bridges.bridge(history, new, tools, tail, memory)

    def refuses_reply(self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool] = ()) -> bool:
        """Whether it is because of the reply, the last message of ``history``, that ``new`` cannot follow.

        After a :class:`ConfigError` of :meth:`bridge` or :meth:`render`: the template renders ``new`` after an ordinary
        reply in its place.
        """
        return self._bridges.refuses_reply(history, new, tools)

    def continuation(self, text: str) -> TokenColumn:
        """Return the ids of text that continues a reply's turn, encoded alone; int32, read-only.

        Raises:
            ConfigError: it contains a special token, and ``special_text`` is ``"error"``.
        """
        return self._model.encode(self._model.marks.guarded_text(text, "StepResult.continuation"))

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, generation_prompt: bool = True) -> str:
        """Render the whole conversation, up to the next reply. The cost is proportional to its length.

        Raises:
            ConfigError: the template cannot render these messages.
        """
        return self._model.template.render(messages, tools, generation_prompt=generation_prompt).replace(GUARD, "")

    def encode(self, text: str) -> TokenColumn:
        """Return the ids of text that the template wrote; int32, read-only."""
        return self._model.codec.encode(text)

    def encode_conversation(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, rendered: str
    ) -> TokenColumn:
        """Return the ids of a whole conversation; ``rendered`` is the result of :meth:`render`.

        Raises:
            ConfigError: as :meth:`opening`.
        """
        guarded = self._model.marks.guarded(messages)
        text = rendered if guarded is messages else self._model.template.render(guarded, tools)
        return self._model.encode(text, images_of(messages))

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
        return self._bridges.rewriting(before, after, history, new, tools, sampled)

    # -- tokens to messages -------------------------------------------------------------------------------------------

    def decode(self, tokens: Sequence[int] | TokenColumn) -> str:
        """Return the text of ids, including special tokens."""
        return self._model.codec.decode(tokens)

    def parse(
        self,
        tokens: Sequence[int] | TokenColumn,
        *,
        tools: Sequence[Tool] = (),
        prompt: Sequence[int] | TokenColumn | None = None,
    ) -> Message:
        """Parse a reply into content, reasoning and tool calls. Never raises because of what the model sampled.

        A call has the id that the model wrote, unless the template refuses it. A call with half of a surrogate pair is
        malformed. Errors of malformed calls quote no special token that ``special_text`` refuses.

        Args:
            tokens: the sampled ids, with or without their stop token.
            tools: the tools of the prompt.
            prompt: the ids before the reply, or the last of them; used to see whether the prompt opened a thinking
                block. Without them, a reply that never closes such a block is parsed as content.
        """
        model, stop = self._model, ""
        if len(tokens) and (last := int(tokens[-1])) in model.stop_ids:
            tokens, stop = tokens[:-1], model.stops[model.stop_ids.index(last)]
        text = model.codec.decode(tokens)
        prefix = "" if prompt is None else model.codec.decode(prompt[-_PROMPT_END:])
        opened = None if prompt is None else opens_thought(prefix, thought_marks(model.dialect)[0])
        reply = parse_stopped(model.dialect, text, stop, tools=tools, reasoning_open=opened, prefix=prefix)
        takes_id = self._tests.takes_id
        calls = [usable_call(call, takes_id=takes_id, quotable=self.quotable) for call in reply.tool_calls]
        return Message("assistant", reply.content, tool_calls=calls, reasoning=reply.reasoning)

    def quotable(self, text: str) -> str:
        """Text that quotes a reply, without the special tokens that ``special_text`` refuses."""
        return self._model.marks.without(text)

    @property
    def reader(self) -> Reader:
        """The functions that write and parse the calls of this template."""
        return self._tests.reader(self.dialect)

    # -- the start-up test --------------------------------------------------------------------------------------------

    def self_test(self, tools: Sequence[Tool] = (), system: str | None = SYSTEM) -> SelfTest:
        """Compare bridges with the template's own rendering of a synthetic conversation.

        With tools, the steps with tool calls are tested too, and the dialect must read the calls that the template
        writes, unless ``dialect="plain"`` was given. If the template refuses the default system prompt, the test runs
        without one. Results are cached by arguments.
        """
        return self._tests.self_test(tools, system)


_RENDERERS_KEPT = 64
"""For each tokenizer: prompts may have template variables of many values."""
_SHARED: weakref.WeakKeyDictionary[Any, dict[str, Renderer]] = weakref.WeakKeyDictionary()
_SHARED_LOCK = threading.Lock()
_loaded = functools.lru_cache(maxsize=8)(load_tokenizer)


def renderer_for(tokenizer: Any, **kwargs: Any) -> Renderer:
    """Return the shared renderer of a tokenizer, or of a path or name to load one from.

    ``kwargs`` are the options of :class:`Renderer`. Renderers are kept as long as their tokenizers, up to a limit, and
    tokenizers that are loaded here are cached. A renderer as ``tokenizer`` is returned unchanged.

    Raises:
        ConfigError: the tokenizer does not load, :class:`Renderer` refuses it, or a renderer comes with ``kwargs``.
    """
    kwargs = {name: value for name, value in kwargs.items() if value is not None}
    if isinstance(tokenizer, Renderer):
        for name, value in kwargs.items():  # the first is named
            raise ConfigError.of(name, value, f"no value: the renderer {tokenizer!r} has options already")
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
