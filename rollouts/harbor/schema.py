"""The tables of a Harbor task's ``task.toml``, schema 1.4, as frozen values: each field is honoured or refused by name.

Invariant: a table with an unknown key, a value of another type, or a field that nothing here honours is a
``ConfigError`` that names the field, so that no setting of a task is dropped in silence. Each field says who honours it
(:data:`Use`); ``docs/harbor.md`` has the same table.

The classes have the names of the models in Harbor 0.25.0 (``harbor/models/task/config.py``), which a test compares with
them where Harbor is installed. This module reads no file, and does not import Harbor.
"""

# ruff: noqa: RUF009 - _field makes a field of attrs
from __future__ import annotations

import ipaddress
import math
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import attrs

from rollouts.errors import ConfigError

__all__ = [
    "MODELS",
    "AgentConfig",
    "ArtifactConfig",
    "EnvironmentConfig",
    "HealthcheckConfig",
    "MCPServerConfig",
    "StepConfig",
    "TaskConfig",
    "Use",
    "VerifierCollectConfig",
    "VerifierConfig",
    "field_table",
    "read_config",
]

Use: TypeAlias = Literal["both", "trial", "stored", "refused"]
"""The ways of play that honour a field: programs of ours and Harbor's Trial (``both``), only the Trial (``trial``),
none because it describes the task (``stored``), or none, so that a task with it is refused (``refused``)."""

_Reader: TypeAlias = Callable[[Any, str], Any]
_T = TypeVar("_T")

_VERSIONS = ("1.0", "1.1", "1.2", "1.3", "1.4")
_SERVICE = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]*")
_PACKAGE = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]*/[a-zA-Z0-9][a-zA-Z0-9._-]*")
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_TOPOLOGY = re.compile(r"[1-9]\d*(x[1-9]\d*)+")
_STEP_CHARACTERS = re.compile(r'[<>:"/\\|?*\x00-\x1f\x7f]')
_DEVICE = re.compile(r"(CON|PRN|AUX|NUL|CONIN\$|CONOUT\$|(?:COM|LPT)[1-9¹²³])", re.IGNORECASE)
_SIZE = re.compile(r"\s*([0-9.]+)\s*([GMK])\s*", re.IGNORECASE)


# -- readers: a TOML value and the name of its field to the value that is stored --------------------------------------


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ConfigError.of(where, value, "a string")
    return value


def _word(value: Any, where: str) -> str:
    if not _text(value, where).strip():
        raise ConfigError.of(where, value, "a string that is not empty")
    return str(value)


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError.of(where, value, "a finite number")
    return float(value) if isinstance(value, float) else value


def _seconds(value: Any, where: str) -> float:
    if _number(value, where) < 0:
        raise ConfigError.of(where, value, "a number of seconds >= 0")
    return float(value)


def _deadline(value: Any, where: str) -> float:
    if _number(value, where) <= 0:
        raise ConfigError.of(where, value, "a number of seconds > 0")
    return float(value)


def _count(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError.of(where, value, "an integer >= 0")
    return value


def _cpus(value: Any, where: str) -> float:
    cpus = _number(value, where)
    if cpus <= 0:
        raise ConfigError.of(where, value, "a number > 0")
    return int(cpus) if cpus == int(cpus) else cpus


def _user(value: Any, where: str) -> str | int:
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise ConfigError.of(where, value, "the name or the number of a user")
    return value


def _texts(value: Any, where: str) -> tuple[str, ...]:
    return _list_of(_text)(value, where)


def _variables(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise ConfigError.of(where, value, "a table of strings")
    return {name: _text(each, f"{where}.{name}") for name, each in value.items()}


def _any_table(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError.of(where, value, "a table")
    return dict(value)


def _one_of(*choices: str, fold: bool = False) -> _Reader:
    def read(value: Any, where: str) -> str:
        found = value.lower() if fold and isinstance(value, str) else value
        if found not in choices:
            raise ConfigError.of(where, value, f"one of {', '.join(choices)}")
        return str(found)

    return read


def _list_of(reader: Callable[[Any, str], _T]) -> Callable[[Any, str], tuple[_T, ...]]:
    def read(value: Any, where: str) -> tuple[_T, ...]:
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise ConfigError.of(where, value, "a list")
        return tuple(reader(each, f"{where}[{number}]") for number, each in enumerate(value))

    return read


def _table_of(cls: type[_T]) -> Callable[[Any, str], _T]:
    def read(value: Any, where: str) -> _T:
        return _read(cls, value, where)

    return read


def _hosts(value: Any, where: str) -> tuple[str, ...]:
    return tuple(_host(each, f"{where}[{number}]") for number, each in enumerate(_texts(value, where)))


def _host(value: str, where: str) -> str:
    host = value.strip().lower().rstrip(".")
    expected = "a host, *.host, an IP address or a network, without a port or a path"
    try:
        if "/" in host:
            return ipaddress.ip_network(host).compressed
        return ipaddress.ip_address(host).compressed
    except ValueError:
        pass
    name = host.removeprefix("*.")
    if not all(_LABEL.fullmatch(label) for label in name.split(".")) or (name != host and _is_address(name)):
        raise ConfigError.of(where, value, expected)
    return host


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _service(value: Any, where: str) -> str:
    service = _text(value, where).strip()
    if not _SERVICE.fullmatch(service):
        raise ConfigError.of(where, value, "the name of a service: letters, digits, '-', '_' and '.'")
    return service


def _package(value: Any, where: str) -> str:
    if not _PACKAGE.fullmatch(_text(value, where)) or ".." in value:
        raise ConfigError.of(where, value, "org/name, of letters, digits, '-', '_' and '.'")
    return str(value)


def _step_name(value: Any, where: str) -> str:
    name = _word(value, where)
    device = _DEVICE.fullmatch(name.partition(".")[0].rstrip(" "))
    if name in (".", "..") or name.endswith((".", " ")) or _STEP_CHARACTERS.search(name) or device:
        raise ConfigError.of(where, value, "the name of a folder that every system can have")
    if len(name.encode()) > 255:
        raise ConfigError.of(where, value, "at most 255 bytes")
    return name


def _inner(value: Any, where: str) -> str:
    if ".." in _word(value, where).split("/"):
        raise ConfigError.of(where, value, "a path without '..'")
    return str(value)


def _destination(value: Any, where: str) -> str | None:
    path = _text(value, where)
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if path and ("\\" in path or path.startswith("/") or not parts or ".." in parts or parts == ["manifest.json"]):
        raise ConfigError.of(where, value, "a relative path without '..' and '\\', other than manifest.json")
    return path or None


def _version(value: Any, where: str) -> str:
    if value not in _VERSIONS:
        raise ConfigError.of(where, value, f"one of {', '.join(_VERSIONS)}")
    return str(value)


def _topology(value: Any, where: str) -> str:
    if not _TOPOLOGY.fullmatch(_text(value, where).strip()):
        raise ConfigError.of(where, value, "sizes joined by 'x', e.g. 2x4")
    return str(value).strip()


def _headers(value: Any, where: str) -> dict[str, str]:
    headers = _variables(value, where)
    for name, each in headers.items():
        if not _HEADER.fullmatch(name) or "\r" in each or "\n" in each:
            raise ConfigError.of(where, {name: each}, "names and values of HTTP headers")
    return headers


def _threshold(value: Any, where: str) -> float | dict[str, float]:
    if isinstance(value, Mapping):
        return {name: _number(each, f"{where}.{name}") for name, each in value.items()}
    return _number(value, where)


def _field(reader: _Reader, use: Use, note: str, default: Any = attrs.NOTHING) -> Any:
    """A field of a table.

    Args:
        reader: checks and converts the TOML value.
        use: who honours it.
        note: what happens with it, for the page.
        default: the value without the field; a list, table or dict is given by its factory. None for no value.
    """
    metadata = {"reader": reader, "use": use, "note": note}
    if isinstance(default, type) or (callable(default) and default is not attrs.NOTHING):
        return attrs.field(factory=default, metadata=metadata)
    return attrs.field(default=default, metadata=metadata)


# -- tables -----------------------------------------------------------------------------------------------------------


@attrs.frozen
class Author:
    """One entry of ``[task].authors``."""

    name: str = _field(_text, "stored", "")
    email: str | None = _field(_text, "stored", "", None)


@attrs.frozen
class PackageInfo:
    """``[task]``: the name of the task in a registry."""

    name: str = _field(_package, "stored", "`org/name`; the name of the prompt")
    version: str | None = _field(_word, "stored", "", None)
    description: str = _field(_text, "stored", "", "")
    authors: tuple[Author, ...] = _field(_list_of(_table_of(Author)), "stored", "", tuple)
    keywords: tuple[str, ...] = _field(_texts, "stored", "", tuple)


_PHASE = "as `[environment]` has it; another policy than that of the environment is refused"


@attrs.frozen
class AgentConfig:
    """``[agent]``: limits of the agent's phase."""

    timeout_sec: float | None = _field(
        _deadline, "both", "deadline of the agent; at it the agent ends and the task is graded", None
    )
    user: str | int | None = _field(_user, "both", "user of the agent; default: that of the image", None)
    network_mode: str | None = _field(_one_of("public", "no-network", "allowlist"), "both", _PHASE, None)
    allowed_hosts: tuple[str, ...] | None = _field(_hosts, "refused", "no kind of sandbox filters hosts", None)


@attrs.frozen
class HealthcheckConfig:
    """``[environment.healthcheck]``, or that of a step: a command that must succeed before the agent starts."""

    command: str = _field(_word, "both", "exit code 0 is healthy")
    interval_sec: float = _field(_seconds, "both", "pause between checks", 5.0)
    timeout_sec: float = _field(_deadline, "both", "deadline of one check", 30.0)
    start_period_sec: float = _field(_seconds, "both", "failures within it do not count", 0.0)
    start_interval_sec: float = _field(_seconds, "both", "pause between checks within it", 5.0)
    retries: int = _field(_count, "both", "consecutive failures that end the rollout: `environment_start`", 3)


@attrs.frozen
class TpuSpec:
    """``[environment.tpu]``."""

    type: str = _field(_word, "refused", "no sandbox has a TPU")
    topology: str = _field(_topology, "refused", "no sandbox has a TPU")


@attrs.frozen
class MCPServerConfig:
    """One entry of ``[[environment.mcp_servers]]``."""

    name: str = _field(_word, "trial", "the agent of the Trial is configured with it")
    transport: str = _field(_one_of("sse", "stdio", "streamable-http", "http"), "trial", "`http` is the last", "sse")
    url: str | None = _field(_word, "trial", "needed by `sse` and `streamable-http`", None)
    command: str | None = _field(_word, "trial", "needed by `stdio`", None)
    args: tuple[str, ...] = _field(_texts, "trial", "", tuple)
    headers: dict[str, str] = _field(_headers, "trial", "", dict)

    def __attrs_post_init__(self) -> None:
        needs = "command" if self.transport == "stdio" else "url"
        if getattr(self, needs) is None:
            raise ConfigError.of(f"mcp_servers.{needs}", None, f"a value: transport={self.transport!r} needs it")
        if self.transport == "stdio" and self.headers:
            raise ConfigError.of("mcp_servers.headers", self.headers, "none: transport='stdio' has no headers")


@attrs.frozen
class EnvironmentConfig:
    """``[environment]``, or ``[verifier.environment]``: the place of the agent or of the verifier."""

    network_mode: str = _field(
        _one_of("public", "no-network", "allowlist"),
        "both",
        "`allowlist` is refused; `public` needs a kind with a network, or `network=none` of the recipe",
        "public",
    )
    allowed_hosts: tuple[str, ...] | None = _field(_hosts, "refused", "no kind of sandbox filters hosts", None)
    build_timeout_sec: float = _field(_deadline, "both", "deadline of the image and of the start", 600.0)
    docker_image: str | None = _field(_word, "both", "the image, by its name on this machine", None)
    os: str = _field(_one_of("linux", "windows", fold=True), "both", "`windows` is refused", "linux")
    cpus: float | None = _field(_cpus, "both", "needs control groups that can be written, or `ignore`", None)
    memory_mb: int | None = _field(
        _count, "both", "as `cpus`; of all processes, in addition to `storage_mb` for files, which are in memory", None
    )
    storage_mb: int | None = _field(_count, "both", "limit of the box's files", None)
    gpus: int | None = _field(_count, "refused", "0 is accepted", None)
    gpu_types: tuple[str, ...] | None = _field(_texts, "refused", "an empty list is accepted", None)
    tpu: TpuSpec | None = _field(_table_of(TpuSpec), "refused", "", None)
    mcp_servers: tuple[MCPServerConfig, ...] = _field(_list_of(_table_of(MCPServerConfig)), "trial", "", tuple)
    env: dict[str, str] = _field(
        _variables, "both", "`${VAR}` and `${VAR:-default}` read only the variables that the recipe names", dict
    )
    skills_dir: str | None = _field(_word, "trial", "the agent of the Trial gets it", None)
    healthcheck: HealthcheckConfig | None = _field(_table_of(HealthcheckConfig), "both", "", None)
    workdir: str | None = _field(_word, "both", "folder of the commands; default: that of the image", None)
    allow_internet: bool | None = _field(lambda value, where: value, "both", "old; `false` is `no-network`", None)


@attrs.frozen
class VerifierCollectConfig:
    """One entry of ``[[verifier.collect]]``: a command between the agent and the verifier."""

    command: str = _field(_word, "both", "a failure of the command is recorded, and costs nothing")
    service: str = _field(_service, "both", "only `main`: compose files are refused", "main")
    timeout_sec: float = _field(_deadline, "both", "", 60.0)
    user: str | int | None = _field(_user, "both", "", None)


@attrs.frozen
class VerifierConfig:
    """``[verifier]``: how the task is graded."""

    timeout_sec: float = _field(
        _deadline, "both", "deadline of `tests/test.sh`; not inherited by a step (its default is 600)", 600.0
    )
    env: dict[str, str] = _field(_variables, "both", "as `[environment].env`", dict)
    user: str | int | None = _field(_user, "both", "", None)
    network_mode: str | None = _field(_one_of("public", "no-network", "allowlist"), "both", _PHASE, None)
    allowed_hosts: tuple[str, ...] | None = _field(_hosts, "refused", "no kind of sandbox filters hosts", None)
    environment_mode: str | None = _field(
        _one_of("shared", "separate"), "both", "`separate`, or the rung of `check-task`", None
    )
    environment: EnvironmentConfig | None = _field(
        _table_of(EnvironmentConfig), "both", "the verifier's box; implies `separate`", None
    )
    collect: tuple[VerifierCollectConfig, ...] = _field(
        _list_of(_table_of(VerifierCollectConfig)), "both", "run before the processes of the agent are killed", tuple
    )

    def __attrs_post_init__(self) -> None:
        if self.environment_mode == "shared" and self.environment is not None:
            raise ConfigError.of("verifier.environment_mode", "shared", "separate: [verifier.environment] is set")

    @property
    def separate(self) -> bool | None:
        """Whether the task asks for a fresh place of the verifier; ``None`` if it does not say."""
        if self.environment_mode is not None:
            return self.environment_mode == "separate"
        return True if self.environment is not None else None


@attrs.frozen
class SolutionConfig:
    """``[solution]``: of the oracle."""

    env: dict[str, str] = _field(_variables, "both", "variables of `solve.sh`", dict)


@attrs.frozen
class ArtifactConfig:
    """One entry of ``artifacts``: files that a separate verifier gets."""

    source: str = _field(_inner, "both", "path in the box; relative paths are in the working folder")
    destination: str | None = _field(_destination, "stored", "a path of Harbor's trial folder", None)
    exclude: tuple[str, ...] = _field(_texts, "both", "patterns of `tar --exclude`", tuple)
    service: str | None = _field(_service, "both", "only `main`", None)


def _artifact(value: Any, where: str) -> ArtifactConfig:
    return _read(ArtifactConfig, {"source": value} if isinstance(value, str) else value, where)


@attrs.frozen
class StepConfig:
    """One entry of ``[[steps]]``."""

    name: str = _field(_step_name, "trial", "a folder of `steps/`")
    agent: AgentConfig = _field(_table_of(AgentConfig), "trial", "", AgentConfig)
    verifier: VerifierConfig = _field(_table_of(VerifierConfig), "trial", "", VerifierConfig)
    min_reward: float | dict[str, float] | None = _field(_threshold, "trial", "less ends the task", None)
    healthcheck: HealthcheckConfig | None = _field(_table_of(HealthcheckConfig), "trial", "", None)
    artifacts: tuple[ArtifactConfig, ...] = _field(_list_of(_artifact), "trial", "", tuple)


def _steps(value: Any, where: str) -> tuple[StepConfig, ...]:
    steps = _list_of(_table_of(StepConfig))(value, where)
    keys = [unicodedata.normalize("NFC", step.name).casefold() for step in steps]
    for number, key in enumerate(keys):
        if key in keys[:number]:
            raise ConfigError.of(f"{where}[{number}].name", steps[number].name, "a name that no other step has")
    return steps


@attrs.frozen
class TaskConfig:
    """The whole of ``task.toml``."""

    schema_version: str = _field(_version, "both", "1.0 to 1.4; the old name is `version`", "1.4")
    task: PackageInfo | None = _field(_table_of(PackageInfo), "stored", "", None)
    metadata: dict[str, Any] = _field(_any_table, "stored", "", dict)
    verifier: VerifierConfig = _field(_table_of(VerifierConfig), "both", "", VerifierConfig)
    agent: AgentConfig = _field(_table_of(AgentConfig), "both", "", AgentConfig)
    environment: EnvironmentConfig = _field(_table_of(EnvironmentConfig), "both", "", EnvironmentConfig)
    solution: SolutionConfig = _field(_table_of(SolutionConfig), "both", "", SolutionConfig)
    source: str | None = _field(_text, "stored", "", None)
    multi_step_reward_strategy: str | None = _field(
        _one_of("mean", "final"), "trial", "`mean` of the steps, or the `final` one", None
    )
    steps: tuple[StepConfig, ...] | None = _field(_steps, "trial", "", None)
    artifacts: tuple[ArtifactConfig, ...] = _field(_list_of(_artifact), "both", "", tuple)


MODELS: Mapping[str, type[Any]] = {
    cls.__name__: cls
    for cls in (
        TaskConfig,
        PackageInfo,
        Author,
        AgentConfig,
        VerifierConfig,
        VerifierCollectConfig,
        EnvironmentConfig,
        HealthcheckConfig,
        MCPServerConfig,
        TpuSpec,
        SolutionConfig,
        ArtifactConfig,
        StepConfig,
    )
}
"""The tables by the names of Harbor's models."""

_TABLES = {
    "TaskConfig": "top",
    "PackageInfo": "[task]",
    "Author": "[[task.authors]]",
    "AgentConfig": "[agent]",
    "VerifierConfig": "[verifier]",
    "VerifierCollectConfig": "[[verifier.collect]]",
    "EnvironmentConfig": "[environment]",
    "HealthcheckConfig": "[environment.healthcheck]",
    "MCPServerConfig": "[[environment.mcp_servers]]",
    "TpuSpec": "[environment.tpu]",
    "SolutionConfig": "[solution]",
    "ArtifactConfig": "artifacts",
    "StepConfig": "[[steps]]",
}


def field_table() -> str:
    """The table of all fields for the page, in Markdown."""
    lines = ["| table | field | honoured by | note |", "|---|---|---|---|"]
    words = {"both": "programs, Trial", "trial": "Trial", "stored": "stored only", "refused": "refused"}
    for name, cls in MODELS.items():
        for field in attrs.fields(cls):
            use, note = words[field.metadata["use"]], field.metadata["note"]
            lines.append(f"| `{_TABLES[name]}` | `{field.name}` | {use} | {note} |".replace("|  |", "| |"))
    return "\n".join(lines) + "\n"


# -- reading ----------------------------------------------------------------------------------------------------------


def read_config(data: Mapping[str, Any]) -> TaskConfig:
    """Read the tables of a ``task.toml``.

    Raises:
        ConfigError: a key is unknown, a value is wrong, or a field is set that nothing honours; the message names it.
    """
    given = dict(data)
    if "version" in given:
        given.setdefault("schema_version", given.pop("version"))
        given.pop("version", None)
    return _read(TaskConfig, given, "")


def _read(cls: type[_T], value: Any, where: str) -> _T:
    """Read one table; ``where`` is its path in the file."""
    if not isinstance(value, Mapping):
        raise ConfigError.of(where, value, "a table")
    given = _renamed(dict(value), where) if cls is EnvironmentConfig else dict(value)
    fields = {field.name: field for field in attrs.fields(cls)}  # type: ignore[arg-type]
    dot = f"{where}." if where else ""
    for key in given:
        if key not in fields:
            raise ConfigError.of(f"{dot}{key}", given[key], f"a known key: {', '.join(fields)}")
    for name, field in fields.items():
        if field.default is attrs.NOTHING and name not in given:
            raise ConfigError.of(f"{dot}{name}", None, "a value: it is required")
    read = {name: fields[name].metadata["reader"](each, f"{dot}{name}") for name, each in given.items()}
    for name, each in read.items():
        if fields[name].metadata["use"] == "refused" and each:
            raise ConfigError.of(f"{dot}{name}", given[name], f"no value: {fields[name].metadata['note'] or 'refused'}")
    if read.get("network_mode") == "allowlist":
        raise ConfigError.of(
            f"{dot}network_mode", "allowlist", "public or no-network: no kind of sandbox filters hosts"
        )
    if read.get("os") == "windows":
        raise ConfigError.of(f"{dot}os", "windows", "linux")
    if read.get("service") not in (None, "main"):
        raise ConfigError.of(f"{dot}service", read["service"], "main: tasks with several services are refused")
    return cls(**read)


def _renamed(given: dict[str, Any], where: str) -> dict[str, Any]:
    """An environment with the old names of its fields replaced."""
    for old, new in (("memory", "memory_mb"), ("storage", "storage_mb")):
        if old in given:
            size = _megabytes(given.pop(old), f"{where}.{old}")
            if given.setdefault(new, size) != size:
                raise ConfigError.of(f"{where}.{new}", given[new], f"{size}, as {old!r} says")
    internet = given.pop("allow_internet", None)
    if internet is not None:
        if not isinstance(internet, bool):
            raise ConfigError.of(f"{where}.allow_internet", internet, "true or false")
        if given.get("allowed_hosts") is None:
            given.setdefault("network_mode", "public" if internet else "no-network")
    return given


def _megabytes(value: Any, where: str) -> int:
    size = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if size is None:
        raise ConfigError.of(where, value, "a size as '2G', '512M' or '1024K'")
    return int(float(size[1]) * {"G": 1024.0, "M": 1.0, "K": 1 / 1024}[size[2].upper()])
