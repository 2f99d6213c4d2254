"""The trial of a template in a separate process."""

from __future__ import annotations

import datetime

import pytest

from rollouts.errors import ConfigError
from rollouts.renderer.template import ChatTemplate
from rollouts.renderer.template_sandbox import problem_of

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}"
CALLS_ONLY = "{% for m in messages %}{% if m.tool_calls %}" + LOOP + "{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (LOOP, "it does not end within"),
        (CALLS_ONLY, "it does not end within"),
        ("{{ 'x' * 3000000000 }}", "more than 2 GiB of memory"),
        (DOUBLING, "more than 2 GiB of memory"),
        ("{{ 'x' * (messages|length * 20000000) }}", "it writes 20,000,000 characters for a short conversation"),
    ],
)
def test_a_template_that_does_not_end_is_found(source: str, words: str) -> None:
    """Hardening 15: endless loops and huge texts end at a deadline and a memory limit, outside this process."""
    assert words in str(problem_of(source, "{}", 1.0 if "does not end" in words else 60.0))


@pytest.mark.parametrize("source", ["{{ messages[0].content }}", "{{ raise_exception('no') }}", "{% if", "{{ a.b.c }}"])
def test_an_ordinary_template_and_an_ordinary_error_are_no_problem(source: str) -> None:
    """Errors are reported where the template is compiled for use."""
    assert problem_of(source, "{}") is None


def test_the_error_names_the_template() -> None:
    """Before anything of it is compiled here."""
    with pytest.raises(ConfigError, match=r"chat template mine \(.*\): it needs more than 2 GiB"):
        ChatTemplate("{{ 'x' * 3000000000 }}", name="mine", variables={}, moment=datetime.datetime(2031, 2, 3))
