"""Wishes of a request for replies of one form, as parameters that constrain decoding.

Invariant: a request has one constraint at most. A form that no parameter expresses is counted as not enforced. This
module does not know whether a server can constrain replies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollouts.programs.gateway.types import ApiError, Constraint
from rollouts.programs.gateway.wire import Counts, Fields, encoded

__all__ = ["constraint_of_format", "constraint_of_servers", "only_constraint"]

_SERVERS: Mapping[str, str] = {
    "regex": "regex",
    "ebnf": "ebnf",
    "guided_regex": "regex",
    "guided_grammar": "ebnf",
    "guided_json": "json_schema",
}
"""The parameter of each field of SGLang's and vLLM's chat servers beyond the API."""
_STRUCTURED: Mapping[str, str] = {"json": "json_schema", "regex": "regex", "grammar": "ebnf"}
"""The parameter of each entry of vLLM's ``structured_outputs``."""


def constraint_of_format(form: Fields | None, field: str, counts: Counts) -> Constraint | None:
    """The constraint of a format of OpenAI's and Anthropic's APIs.

    Args:
        form: with its ``type``, and a ``schema``, which the chat API has in an object ``json_schema``.
        field: the name of the field in counts.
        counts: gets a type that is not enforced.

    Raises:
        ApiError: the format has no schema.
    """
    kind = "text" if form is None else form.required("type")
    if form is None or kind == "text":
        return None
    if kind == "json_object":
        return Constraint(field, "json_schema", '{"type":"object"}')
    if kind != "json_schema":
        counts[f"not_enforced/{field}"] += 1
        return None
    holder = form.object("json_schema") or form
    schema = holder.object("schema")
    if schema is None:
        raise holder.wrong("schema", "a JSON schema")
    return Constraint(field, "json_schema", encoded(schema.value).decode())


def constraint_of_servers(fields: Fields, counts: Counts) -> list[Constraint]:
    """The constraints in the fields of SGLang's and vLLM's chat servers beyond the API.

    Raises:
        ApiError: a field has a wrong type.
    """
    if fields.value.keys().isdisjoint((*_SERVERS, "structured_outputs")):
        return []
    found = [_constraint(fields, name, name, kind) for name, kind in _SERVERS.items()]
    structured = fields.object("structured_outputs")
    if structured is not None:
        found += [_constraint(structured, name, "structured_outputs", kind) for name, kind in _STRUCTURED.items()]
        if any(structured.value.get(name) is not None for name in structured.value.keys() - _STRUCTURED.keys()):
            counts["not_enforced/structured_outputs"] += 1
    return [one for one in found if one is not None]


def _constraint(fields: Fields, name: str, field: str, kind: str) -> Constraint | None:
    value = fields.value.get(name)
    if value is None:
        return None
    if kind == "json_schema" and isinstance(value, Mapping):
        return Constraint(field, kind, encoded(value).decode())
    text = fields.required(name)
    if not text:
        raise fields.wrong(name, "a string that is not empty")
    return Constraint(field, kind, text)


def only_constraint(found: Sequence[Constraint | None]) -> Constraint | None:
    """The one constraint of a request; ``None`` if it has none.

    Raises:
        ApiError: it has several.
    """
    given = [one for one in found if one is not None]
    if len(given) > 1:
        names = " and ".join(one.field for one in given)
        raise ApiError("invalid_request", f"{given[1].field}: got {names}; expected one form of the reply")
    return given[0] if given else None
