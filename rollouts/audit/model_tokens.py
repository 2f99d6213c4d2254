"""The tokens of one model: their number, their text, and the tokens that a policy can have sampled, by role.

Invariant: the chat template itself writes the marks of roles, and a template that writes no header
before a reply is refused by name. A mask that a system may choose, such as one without the end of a reply, is unusual
and not broken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rollouts.audit.rows import Finding, Span
from rollouts.dtypes import Message
from rollouts.errors import RolloutsError
from rollouts.renderer import Renderer
from rollouts.renderer.tokenizer import Codec, vocab_size_of

__all__ = ["ModelTokens"]

_REPLY = "reply"
_NEAR = 3
"""The most tokens between a header and the first trained token of a reply; templates and harnesses write longer
beginnings."""


class ModelTokens:
    """A tokenizer with its chat template.

    Args:
        tokenizer: of the model, with its chat template.

    Attributes:
        codec: from ids to text.
        vocab_size: the number of ids of the model.
        why: why the roles cannot be judged; ``None`` if they can.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.codec = Codec(tokenizer)
        self.vocab_size = vocab_size_of(tokenizer)
        self._special = tuple(tokenizer.all_special_tokens)
        self.why: str | None = None
        self._header: tuple[int, ...] = ()
        self._stops: frozenset[int] = frozenset()
        try:
            renderer = Renderer(tokenizer)
            self._stops = frozenset(renderer.stop_token_ids)
            shown = [Message("user", "text")]
            before, after = renderer.render(shown, generation_prompt=False), renderer.render(shown)
            past = renderer.render([*shown, Message("assistant", _REPLY)], generation_prompt=False)
        except RolloutsError as error:
            self.why = f"the chat template of the tokenizer does not render a reply ({error})"
            return
        headers = [
            tuple(renderer.encode(text[len(before) :]).tolist())
            for text in (after, past.partition(_REPLY)[0])
            if text.startswith(before)
        ]
        # A template may begin a reply, e.g. with an empty thought; both forms begin with the header.
        common = next((n for n, ids in enumerate(zip(*headers, strict=False)) if len(set(ids)) > 1), None)
        self._header = headers[0][:common] if headers else ()
        if not self._header or not self._stops:
            self.why = f"the chat template of {renderer.name} writes no header before a reply, or it has no stop ids"

    def plain(self, text: str) -> str:
        """Text without special tokens and spaces, which systems store or leave out."""
        for special in self._special:
            text = text.replace(special, "")
        return "".join(text.split())

    def check_roles(
        self, place: str, tokens: Sequence[int], spans: Sequence[Span], *, ended: bool
    ) -> Iterator[Finding]:
        """Check the trained spans of a sequence; at most one finding for each.

        Args:
            place: the name of the row.
            tokens: ids of the sequence.
            spans: its trained positions, start to stop, in order.
            ended: whether the dump says that the last reply is complete.
        """
        for start, stop in spans:
            found = self._check_span(place, tokens, start, stop)
            if found is not None:
                yield found
        if spans and ended and spans[-1][1] == len(tokens) and tokens[-1] not in self._stops:
            where = f"{place}, position {len(tokens) - 1}"
            expected = "a stop id: the row is complete by its status (a stop string, or a cut reply)"
            yield Finding.of("unusual", "roles", where, f"id {tokens[-1]} at the end", expected)

    def _check_span(self, place: str, tokens: Sequence[int], start: int, stop: int) -> Finding | None:
        inside = next((at for at in range(start, stop - 1) if tokens[at] in self._stops), None)
        if inside is not None:
            where = f"{place}, loss_mask, position {inside + 1}"
            return Finding.of(
                "broken", "roles", where, "1", f"0: the stop id {tokens[inside]} before it ended the reply"
            )
        width = len(self._header)
        for at in range(max(0, start - width + 1), min(start, len(tokens) - width) + 1):
            if tuple(tokens[at : at + width]) == self._header and at + width > start:
                where = f"{place}, loss_mask, position {start}"
                return Finding.of("broken", "roles", where, "1", f"0: the header of a reply is at {at} to {at + width}")
        for gap in range(1, _NEAR + 1):
            at = start - gap - width
            if at >= 0 and tuple(tokens[at : at + width]) == self._header:
                where = f"{place}, loss_mask, position {start - gap}"
                expected = f"1 from the end of the header on: position {start} is the first trained one of the reply"
                return Finding.of("unusual", "roles", where, "0", expected)
        if stop < len(tokens) and tokens[stop - 1] not in self._stops and tokens[stop] in self._stops:
            where = f"{place}, loss_mask, position {stop}"
            return Finding.of("unusual", "roles", where, "0", f"1: the stop id {tokens[stop]}, which ends the reply")
        return None
