"""The error tree."""

from __future__ import annotations

from rollouts import errors
from rollouts.errors import ConfigError, RolloutsError, shortened


def test_every_error_has_one_root() -> None:
    """One ``except RolloutsError`` catches what the package raises on purpose; a ConfigError is a ValueError too."""
    classes = [value for name, value in vars(errors).items() if isinstance(value, type) and name.endswith("Error")]
    assert all(issubclass(cls, RolloutsError) for cls in classes)
    assert issubclass(ConfigError, ValueError)


def test_a_config_error_names_field_value_and_expectation() -> None:
    """A long value is shortened, and a value whose ``repr`` raises is named by its type."""
    assert str(ConfigError.of("A.b", 3, "a string")) == "A.b: got 3; expected a string"
    assert len(str(ConfigError.of("A.b", "x" * 10_000, "a string"))) < 200

    class Mute:
        def __repr__(self) -> str:
            raise RuntimeError

    assert shortened(Mute()) == "<Mute that cannot be printed>"
