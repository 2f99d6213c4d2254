"""The form of one model's conversations: its chat template, tokenizer, stop tokens, dialect and image processor.

Invariant: the parts never change; only their caches and counters do. Text of messages becomes ids in
:meth:`ModelFormat.encode` alone. This module does not know openings, bridges or the loss mask.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import attrs

from rollouts.dtypes import Image, Message, TokenColumn, packed_tokens
from rollouts.errors import ConfigError
from rollouts.renderer.dialects import DIALECTS, Dialect, dialect_of_template, get_dialect
from rollouts.renderer.special_text import GUARD, Marks, SpecialText
from rollouts.renderer.switches import Switches
from rollouts.renderer.template import ChatTemplate
from rollouts.renderer.tokenizer import RESPONSE_TEMPLATE, Codec, response_template_of, stop_ids_of

if TYPE_CHECKING:
    from rollouts.renderer.dialects.response_template import DeclaredDialect
    from rollouts.renderer.images import ImageProcessor

__all__ = ["ModelFormat", "images_of"]


@attrs.frozen(kw_only=True)
class ModelFormat:
    """The parts that openings, bridges and self-tests of one renderer share."""

    template: ChatTemplate
    codec: Codec
    marks: Marks
    dialect: Dialect
    declared: Dialect | None
    """The dialect that the publisher declares as ``response_template``."""
    stop_ids: tuple[int, ...]
    stops: tuple[str, ...]
    """The stop tokens as text, in the order of ``stop_ids``."""
    special_ids: frozenset[int]
    images: ImageProcessor | None
    switches: Switches

    @classmethod
    def of(
        cls,
        tokenizer: Any,
        name: str,
        *,
        chat_template: str | Path | None,
        stop_token_ids: Iterable[int] | None,
        dialect: str | Dialect | None,
        template_kwargs: Mapping[str, Any],
        moment: datetime.datetime,
        tells_tools: bool,
        special_text: SpecialText,
        images: Any,
    ) -> ModelFormat:
        """Read a tokenizer called ``name``; the options are those of :class:`~rollouts.renderer.Renderer`.

        Raises:
            ConfigError: as ``Renderer``.
        """
        variables = {**tokenizer.special_tokens_map, **template_kwargs}
        shown: dict[str, Any] = {"variables": variables, "tells_tools": tells_tools, "shows_images": bool(images)}
        template = _python_template(chat_template, name, shown)
        if template is None:
            source = _template_source(tokenizer, chat_template, name)
            template = ChatTemplate(source, name=name, moment=moment, **shown)
        source = template.source
        _check_read(template, template_kwargs, tokenizer.special_tokens_map)
        codec = Codec(tokenizer)
        stop_ids = stop_ids_of(tokenizer) if stop_token_ids is None else dict.fromkeys(int(i) for i in stop_token_ids)
        if not stop_ids:
            raise ConfigError.of("stop_token_ids", (), f"at least one; the tokenizer {name!r} has no EOS token")
        stops = tuple(codec.decode([stop]) for stop in stop_ids)
        read = _declared_dialect(tokenizer)
        declared = None if isinstance(read, ConfigError) else read
        if dialect is None:
            found = dialect_of_template(source)
            dialect = declared if found == "plain" and declared is not None else found
        if dialect == RESPONSE_TEMPLATE:
            if declared is None:
                expected = f"one of {', '.join(DIALECTS)}: {name!r} declares none"
                raise read if isinstance(read, ConfigError) else ConfigError.of("dialect", dialect, expected)
            dialect = declared
        if special_text not in get_args(SpecialText):
            raise ConfigError.of("special_text", special_text, f"one of {', '.join(get_args(SpecialText))}")
        added = getattr(tokenizer, "added_tokens_decoder", {}).items()
        return cls(
            template=template,
            codec=codec,
            marks=Marks(_marks_of(tokenizer, source, stops), special_text),
            dialect=get_dialect(dialect) if isinstance(dialect, str) else dialect,
            declared=declared,
            stop_ids=tuple(stop_ids),
            stops=stops,
            special_ids=frozenset(stop_ids).union(tokenizer.all_special_ids, (i for i, t in added if t.special)),
            images=_image_processor(name if images is True else images, template, codec) if images else None,
            switches=Switches(template, stops),
        )

    def encode(
        self, text: str, images: Sequence[Image] = (), *, counted: bool = True, partly: bool = False
    ) -> TokenColumn:
        """Encode rendered text: marks with a guard are plain text, and placeholders of images are expanded.

        Args:
            text: the text, with guards.
            images: the images of its messages.
            counted: whether the text enters a conversation, and so the counter.
            partly: the text is the start of a rendering, and contains only the first of the images.
        """
        if self.images is not None:
            images = images[: text.count(self.images.placeholder)] if partly else images
            text = self.images.expanded(text, images)
        if GUARD not in text:
            return self.codec.encode(text, counted=counted)
        ids: list[int] = []
        for part, plain in self.marks.parts(text):
            ids += self.codec.encode_plain(part) if plain else self.codec.encode(part, counted=counted).tolist()
        return packed_tokens(ids)

    def images_of(self, messages: Iterable[Message]) -> Sequence[Image]:
        """The images of messages; none without an image processor, where the template refuses them."""
        return () if self.images is None else images_of(messages)


def _declared_dialect(tokenizer: Any) -> DeclaredDialect | ConfigError | None:
    """The dialect of the tokenizer's ``response_template``, or why it cannot be read."""
    declared = response_template_of(tokenizer)
    if declared is None:
        return None
    from rollouts.renderer.dialects.response_template import DeclaredDialect  # here: few tokenizers declare one

    try:
        return DeclaredDialect(declared)
    except ConfigError as error:
        return error


def images_of(messages: Iterable[Message]) -> list[Image]:
    """The images of messages, in their order."""
    return [image for message in messages for image in message.images]


def _image_processor(given: Any, template: ChatTemplate, codec: Codec) -> ImageProcessor:
    from rollouts.renderer.images import ImageProcessor, example_images, load_processor  # here: few runs have images

    processor = load_processor(str(given)) if isinstance(given, str | Path) else given
    written = template.render([Message("user", (next(example_images()),))])
    return ImageProcessor(processor, written, codec.encode_uncounted, codec.decode)


def _check_read(template: ChatTemplate, variables: Mapping[str, Any], special: Mapping[str, Any]) -> None:
    """Refuse variables that have no effect, e.g. a mistyped ``enable_thinking``."""
    for name in variables:
        if name not in template.reads:
            switches = ", ".join(sorted(template.reads - special.keys())) or "none"
            raise ConfigError.of("template_kwargs", name, f"a variable that {template.name} reads: {switches}")


def _python_template(chosen: str | Path | None, name: str, shown: Mapping[str, Any]) -> ChatTemplate | None:
    """The template that ``chat_template`` names as a function; ``None`` if it names none."""
    if chosen is None:
        return None
    from rollouts.renderer.python_template import PythonTemplate, template_function  # here: few templates are functions

    function = template_function(chosen)
    return None if function is None else PythonTemplate(function, name=name, **shown)


def _template_source(tokenizer: Any, chosen: str | Path | None, name: str) -> str:
    if isinstance(chosen, Path):
        try:
            chosen = chosen.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError.of("chat_template", str(chosen), f"a file with a chat template ({error})") from error
    declared = getattr(tokenizer, "chat_template", None)
    if isinstance(declared, Mapping):
        template_name = "default" if chosen is None else chosen
        if template_name in declared:
            return str(declared[template_name])
        if chosen is None:
            names = ", ".join(sorted(declared))
            raise ConfigError.of("chat_template", None, f"the name of a template of {name!r}: {names}")
    source = chosen or declared
    if not isinstance(source, str) or not source:
        expected = f"template text or a function (--chat-template): the tokenizer {name!r} has no chat template"
        raise ConfigError.of("chat_template", source, expected)
    if chosen is not None and "{" not in source:
        expected = f"template text, in Jinja; a file is Path({source!r})"
        raise ConfigError.of("chat_template", source, expected)
    return source


def _marks_of(tokenizer: Any, source: str, stops: Sequence[str]) -> set[str]:
    """The texts of special tokens, and of other added tokens that the template writes."""
    added = {str(token.content): token.special for token in getattr(tokenizer, "added_tokens_decoder", {}).values()}
    marks = {text for text, special in added.items() if special or text in source}
    return marks | set(stops) | set(tokenizer.all_special_tokens)
