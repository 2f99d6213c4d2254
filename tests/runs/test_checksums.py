"""Checksums in JSON texts: every changed bit is detected."""

from __future__ import annotations

import msgspec
import pytest

from rollouts.runs.checksums import CHECKSUM, is_sound, sealed

TEXTS = {
    "an empty object": b"{}",
    "a line": b'{"prompt":"2 + 2","reward":0.5,"more":{"crc32":7}}',
    "an indented text": msgspec.json.format(b'{"status":"running","config":{"batch_size":3}}', indent=2),
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_sealed_text_is_what_it_was_and_sound(text: bytes) -> None:
    """It ends one line, and reads as before with one entry more, the last."""
    found = sealed(text)
    assert found.endswith(b"}\n")
    assert is_sound(found) is True
    content = msgspec.json.decode(found)
    assert list(content)[-1] == CHECKSUM
    del content[CHECKSUM]
    assert content == msgspec.json.decode(text)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_every_flipped_bit_is_seen(text: bytes) -> None:
    """Also in the checksum, in its name and at the end of the line."""
    found = sealed(text)
    for number in range(8 * len(found)):
        changed = bytearray(found)
        changed[number // 8] ^= 1 << number % 8
        assert is_sound(bytes(changed)) is not True, number


def test_a_missing_checksum_differs_from_a_wrong_one() -> None:
    """Files without checksums stay readable."""
    assert is_sound(b'{"a":1}\n') is None
    assert is_sound(b'{"a":1,"crc32":5}\n') is False
