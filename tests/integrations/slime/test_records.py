"""slime's records, or ours of the same shape: fields, defaults, and the way to plain data and back."""

from __future__ import annotations

import pytest

from rollouts.integrations.slime import records as module
from rollouts.integrations.slime.records import DynamicFilterOutput, RolloutFnTrainOutput, Sample, records


def test_a_sample_is_plain_data_and_back() -> None:
    """Attributes that are not fields survive; the status is plain text in between."""
    sample = Sample(index=3, tokens=[1, 2], status=Sample.Status.TRUNCATED)
    sample.prefix_cache_info.cached_tokens = 5
    sample.extra = {"a": 1}  # type: ignore[attr-defined]
    data = sample.to_dict()
    assert (data["status"], data["prefix_cache_info"]["cached_tokens"], data["extra"]) == ("truncated", 5, {"a": 1})
    back = Sample.from_dict(data)
    assert back == sample
    assert back.extra == {"a": 1}  # type: ignore[attr-defined]


def test_the_status_is_needed() -> None:
    """As slime needs it."""
    with pytest.raises(KeyError, match="status"):
        Sample.from_dict({"index": 1})


def test_a_new_sample_shares_nothing() -> None:
    """Each has its own lists."""
    first, second = Sample(), Sample()
    first.tokens.append(1)
    first.metadata["a"] = 1
    assert (second.tokens, second.metadata) == ([], {})


def test_the_fields_are_slimes() -> None:
    """Where slime is there, names and defaults are compared; its class is then the one in use."""
    in_use = records()
    if not in_use.is_slime:
        assert in_use.sample is module.Sample
        return
    theirs = {name: entry.default for name, entry in in_use.sample.__dataclass_fields__.items()}
    ours = {name: entry.default for name, entry in Sample.__dataclass_fields__.items()}
    assert list(ours) == list(theirs)
    plain = {name for name, default in theirs.items() if default is None or isinstance(default, int | float | str)}
    assert {name: ours[name] for name in plain} == {name: theirs[name] for name in plain}


def test_outputs_have_slimes_shape() -> None:
    """Fields by name."""
    assert RolloutFnTrainOutput([[1]]).metrics is None
    assert not DynamicFilterOutput(keep=False).keep_when_insufficient
