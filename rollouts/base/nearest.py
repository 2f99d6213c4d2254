"""The known names that a misspelled one is nearest to, for error messages."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["did_you_mean", "nearest"]


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """At most three known names that are about equally near, the nearest first; empty where none is near.

    A name that begins exactly one known name means it. Case does not count, nor does ``-`` in the place of ``_``.
    """
    import difflib  # here: only an error needs it

    by_form = {_form(each): each for each in known}
    begun = [each for form, each in by_form.items() if len(name) > 3 and form.startswith(_form(name))]
    if len(begun) == 1:
        return begun
    found = difflib.get_close_matches(_form(name), by_form)
    ratios = [difflib.SequenceMatcher(None, form, _form(name)).ratio() for form in found]
    return [by_form[form] for form, ratio in zip(found, ratios, strict=True) if ratio > ratios[0] - 0.1]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A part of a message, ``" (did you mean …?)"``; empty where no known name is near."""
    found = nearest(name, known)
    return f" (did you mean {' or '.join(found)}?)" if found else ""


def _form(name: str) -> str:
    return name.lower().replace("-", "_")
