"""The settings file ``train_config.yaml``: environments, reward reduction, secrets.

Invariant: loaded settings are valid; an unknown key, a value of another type and an invalid template raise an error
with their place in the file. A secret's value is in no repr; a secret without a value is listed by name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import attrs
import msgspec
import yaml

from rollouts.environments.ors import ORSServer
from rollouts.errors import ConfigError
from rollouts.renderer import Renderer

__all__ = ["KEY", "EnvironmentSettings", "KitSettings", "api_url", "load_settings"]

KEY = "OPENREWARD_API_KEY"
_HOME = "https://openreward.ai"


class EnvironmentSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One environment: the kit's fields, and ``weight``, ``base_url`` and ``group_score``."""

    splits: tuple[str, ...] = ("train",)
    num_samples: int | None = None
    """Number of tasks of each split; all by default."""
    nonterminal_reward: float | None = None
    """An additional reward if the environment did not finish the episode."""
    reward_reduction: Literal["sum", "mean", "max", "min"] = "sum"
    min_reward: float | None = None
    max_reward: float | None = None
    secrets: dict[str, str | None] = {}
    """Values by name; ``null`` reads the environment variable of that name, as written or in capitals."""
    max_turns: int = 20
    weight: float | None = None
    """Its share of the rows, relative to the other environments; by default its number of tasks."""
    base_url: str | None = None
    """URL of a self-hosted server."""
    group_score: bool = False
    """Add the environment's comparison of a group to the rewards of its rollouts."""

    def __repr__(self) -> str:
        shown = {name: getattr(self, name) for name in self.__struct_fields__ if name != "secrets"}
        return f"EnvironmentSettings({shown}, secrets {sorted(self.secrets)})"


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    environments: dict[str, EnvironmentSettings]
    secrets: dict[str, str | None] = {}
    system_prompt_template: str | None = None
    thinking: bool = False
    openreward_run_name: str = "slime-training"


@attrs.frozen
class KitSettings:
    """All settings of the file."""

    environments: Mapping[str, EnvironmentSettings]
    system_prompt_template: str | None = None
    """System prompt of each task; ``{tools}`` in it lists the tools, in place of the chat template."""
    thinking: bool = False
    run_name: str = "slime-training"
    _secrets: Mapping[str, str | None] = attrs.field(factory=dict, repr=False)
    renderers: dict[Any, Renderer] = attrs.field(factory=dict, init=False, repr=False, eq=False)
    """Renderers in use, by tokenizer."""
    _servers: dict[tuple[str, str | None], ORSServer] = attrs.field(factory=dict, init=False, repr=False, eq=False)

    @property
    def tools_in_prompt(self) -> bool:
        return self.system_prompt_template is not None and "{tools}" in self.system_prompt_template

    def of(self, name: Any) -> EnvironmentSettings:
        """The settings of an environment.

        Raises:
            ConfigError: the environment is not in the file.
        """
        if name not in self.environments:
            raise ConfigError.of('metadata["env_name"]', name, f"one of {', '.join(self.environments)}")
        return self.environments[name]

    def server(self, name: str, environment: str | None = None) -> ORSServer:
        """The server of an environment, the same for all its rollouts.

        Raises:
            ConfigError: the environment is in OpenReward's cloud, and no key is set.
        """
        if (name, environment) not in self._servers:
            self._servers[name, environment] = self._connected(name, environment)
        return self._servers[name, environment]

    def _connected(self, name: str, environment: str | None) -> ORSServer:
        entry = self.of(name)
        key = os.environ.get(KEY) or None
        url = entry.base_url or os.environ.get("OPENREWARD_SESSION_URL") or _below(_home(), "sessions")
        is_cloud = not (entry.base_url or os.environ.get("OPENREWARD_SESSION_URL"))
        if is_cloud and key is None:
            raise ConfigError.of(KEY, None, f"a key for {url}, or base_url for your own server ({name})")
        values, missing = self._resolved(entry)
        return ORSServer(
            url,
            environment=environment,
            deployment=name,
            api_key=None if entry.base_url else key,
            secrets=values,
            missing_secrets=missing,
        )

    def _resolved(self, entry: EnvironmentSettings) -> tuple[dict[str, str], list[str]]:
        """Secrets with a value, and names of secrets without one. The environment's secrets override common ones."""
        values: dict[str, str] = {}
        missing: list[str] = []
        for name, given in {**self._secrets, **entry.secrets}.items():
            value = given or os.environ.get(name) or os.environ.get(name.upper())
            if value:
                values[name] = value
            elif given is None:
                missing.append(name)
        return values, missing


def load_settings(path: str | Path) -> KitSettings:
    """Read the file.

    Raises:
        ConfigError: a missing file, invalid YAML, or an invalid value; the message names its place.
    """
    path = Path(path)
    try:
        given = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError.of("config", str(path), f"a YAML file ({error.strerror})") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: no YAML: {' '.join(str(error).split())}") from None
    try:
        file = msgspec.convert(given, _File)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from None
    for name, entry in file.environments.items():
        if entry.max_turns < 1 or (entry.num_samples is not None and entry.num_samples < 1):
            raise ConfigError.of(f"{path}: {name}", entry, "max_turns and num_samples of at least 1")
        if entry.weight is not None and not entry.weight > 0:
            raise ConfigError.of(f"{path}: {name}.weight", entry.weight, "a number > 0")
    if not file.environments:
        raise ConfigError.of(f"{path}: environments", {}, "at least one")
    if file.system_prompt_template is not None:
        try:
            file.system_prompt_template.format(tools="")
        except (KeyError, ValueError, IndexError) as error:
            expected = "text with {tools}, where other braces are doubled"
            raise ConfigError.of(f"{path}: system_prompt_template", error, expected) from None
    return KitSettings(
        environments=file.environments,
        system_prompt_template=file.system_prompt_template,
        thinking=file.thinking,
        run_name=os.environ.get("OPENREWARD_RUN_NAME", file.openreward_run_name),
        secrets=file.secrets,
    )


def api_url() -> str:
    """URL to which trajectories are uploaded."""
    return os.environ.get("OPENREWARD_API_URL") or _below(_home(), "api")


def _home() -> str:
    return os.environ.get("OPENREWARD_URL", _HOME)


def _below(url: str, part: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=f"{part}.{parts.netloc}").geturl()
