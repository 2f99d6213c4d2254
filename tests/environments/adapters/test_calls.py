"""The common part of the adapters of other packages' environments."""

from __future__ import annotations

import threading

import PIL.Image
import pytest

from rollouts.dtypes import Image, Message
from rollouts.environments.adapters.calls import call, numbers_of, with_content
from rollouts.errors import ConfigError


def test_a_text_joins_the_last_user_message_or_follows_another_one() -> None:
    """Templates that demand alternating roles take the opening."""
    system, user = Message("system", "Be brief."), Message("user", "Play.")
    assert with_content([system, user], "Board: .") == (system, Message("user", "Play.\n\nBoard: ."))
    assert with_content([system], "Board: .") == (system, Message("user", "Board: ."))
    assert with_content([Message("user", "")], "Board: .") == (Message("user", "Board: ."),)
    assert with_content([user], "") == [user]


def test_a_text_joins_a_message_with_an_image() -> None:
    """The image stays in its place, and is not written as text."""
    image = Image.of(PIL.Image.new("RGB", (4, 4)))
    (joined,) = with_content([Message("user", ["Play.", image])], "Board: .")
    assert joined.content == ("Play.", image, "\n\nBoard: .")
    (shown,) = with_content([Message("user", "Play.")], (image, "Board"))
    assert shown.content == ("Play.", image, "Board")


async def test_synchronous_code_runs_in_a_thread_and_async_code_in_the_loop() -> None:
    """Foreign code that waits does not block other rollouts."""

    async def awaited(value: int) -> tuple[int, int]:
        return value, threading.get_ident()

    assert await call(awaited, 1) == (1, threading.get_ident())
    assert await call(threading.get_ident) != threading.get_ident()


def test_metrics_are_the_numbers_of_a_mapping() -> None:
    """Strings, lists and NaN are not metrics, and a list in place of the mapping is refused."""
    assert numbers_of({"turns": 2, "name": "x", "nan": float("nan"), "won": True}, "m") == {"turns": 2, "won": 1}
    with pytest.raises(ConfigError, match=r"get_metrics: got \[1\]"):
        numbers_of([1], "get_metrics")
