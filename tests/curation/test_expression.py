"""``--where``: which rollouts an expression keeps, and which texts are refused instead of being run."""

from __future__ import annotations

from typing import Any

import pytest

from rollouts.curation.expression import ROLLOUT_FIELDS, TASK_FIELDS, Where
from rollouts.errors import ConfigError

FACTS: dict[str, Any] = {
    "pass_rate": 0.5,
    "n": 8,
    "turns": 3,
    "reward": 1.0,
    "passed": True,
    "status": "completed",
    "version": 12,
    "batch": None,
    "label": "a..b",
    "metadata": {"level": 3, "kind": {"name": "algebra"}, "tags": ["x", "y"]},
    "metrics": {"tool_calls": 2, "env/seconds": 0.5},
}


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("pass_rate in 0.1..0.9", True),
        ("pass_rate in 0.6..0.9", False),
        ("pass_rate in 0.5..0.5 and turns <= 3", True),
        ("turns in -1..2", False),
        ("turns not in -1..2", True),
        ("0 < turns < 4", True),
        ("not (turns > 2 or reward < 1)", False),
        ("turns > 5 or status == 'completed'", True),
        ("status in ('completed', 'truncated')", True),
        ("status not in ['truncated']", True),
        ("label == 'a..b'", True),
        ("label == '1..2'", False),
        ("passed", True),
        ("not passed", False),
        ("passed == True", True),
        ("batch == None", True),
        ("batch >= 0", False),
        ("not batch >= 0", False),
        ("batch not in 0..3", False),
        ("not batch in 0..3", False),
        ("batch != None", False),
        ("metadata.level >= 3", True),
        ("metadata.kind.name == 'algebra'", True),
        ("metadata['kind']['name'] != 'algebra'", False),
        ("'x' in metadata.tags", True),
        ("metrics.tool_calls == 2", True),
        ("metrics['env/seconds'] < 1", True),
        ("metadata.missing == 1", False),
        ("metadata.missing != 1", False),
        ("not metadata.missing == 1", False),
        ("not metadata.missing", False),
        ("not (metadata.missing == 1 and turns == 3)", False),
        ("not (metadata.missing == 1 and turns == 4)", True),
        ("metadata.missing == 1 or turns == 3", True),
        ("mean > 0", False),
        (" version >= 12 ", True),
    ],
)
def test_an_expression_keeps_a_rollout_by_its_fields(text: str, kept: bool) -> None:
    """Comparisons, chains, ranges with both ends, lists and open fields; no form is true by an absent field alone."""
    assert Where(text)(FACTS) is kept


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1",
        "turns",
        "turns +",
        "turns + 1 > 2",
        "len(label) > 2",
        "__import__('os').system('true')",
        "__range__(0, 1)",
        "turns.real > 1",
        "metadata",
        "metadata.__class__",
        "metadata[0] == 1",
        "metadata['a'].b() == 1",
        "reward is None",
        "[turns for turns in label]",
        "lambda: 1",
        "(turns := 2) > 1",
        "f'{turns}' == '3'",
        "turn <= 20",
        "turns <= 20; reward",
        "turns in reward",
        "(" * 5000,
        "not " * 900 + "passed",
        "turns > 1 and " * 500 + "passed",
    ],
)
def test_any_other_form_is_refused_or_keeps_by_fields_alone(text: str) -> None:
    """Calls, arithmetic, unknown names and forms without a comparison are refused by ``--where``."""
    if text in ("turns", "metadata.__class__"):
        assert Where(text)(FACTS) is False
        return
    with pytest.raises(ConfigError, match="--where"):
        Where(text)(FACTS)


def test_values_that_have_no_order_are_an_error() -> None:
    """A number and a string are not compared in silence."""
    with pytest.raises(ConfigError, match="two numbers, or two strings"):
        Where("label < 3")(FACTS)
    with pytest.raises(ConfigError, match="in an object is its name"):
        Where("label in metadata.counts")({"label": ["a"], "metadata": {"counts": {"a": 1}}})
    with pytest.raises(ConfigError, match="a range from the lower number"):
        Where("pass_rate in 0.9..0.1")


def test_an_open_field_that_no_rollout_has_is_an_error() -> None:
    """A misspelled name keeps nothing, and says so."""
    where = Where("metadata.lvel == 3 or turns == 3")
    assert where(FACTS)
    with pytest.raises(ConfigError, match=r"metadata\.lvel"):
        where.check_seen()
    behind = Where("turns == 4 and metadata.lvel == 3")
    assert not behind(FACTS)
    behind.check_seen()  # it was compared with no rollout


def test_every_field_has_a_meaning() -> None:
    """The names of the documentation are those of the code."""
    assert not TASK_FIELDS.keys() & ROLLOUT_FIELDS.keys()
    for name in (*TASK_FIELDS, *ROLLOUT_FIELDS):
        assert Where(f"{name} == {name}").fields == {name}
