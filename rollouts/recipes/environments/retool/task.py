"""The task: problems from common data sets, and the Python tool.

Invariant: a row is a problem and a final answer in one of the known shapes; any other row is an error with its
number. The reward is :func:`rollouts.training.rewards.boxed_math`, on the last reply.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rollouts.dtypes import Prompt, as_messages
from rollouts.environments.python_tool import PythonToolEnvironment
from rollouts.errors import ConfigError
from rollouts.extras import install_command

__all__ = ["RetoolEnvironment", "load_maths"]

_HUB = re.compile(r"hub:([^/]+/[^/]+)/(.+)")
_KINDS = (".jsonl", ".parquet")
_EXPECTED = "prompt and label, prompt and reward_model.ground_truth (DAPO), or problem and answer (AIME)"


class RetoolEnvironment(PythonToolEnvironment):
    """Python programs in several turns; a reply without a call is the answer."""

    system_prompt = (
        "Solve the problem step by step. Run Python with the tool where it helps, and print what you want to see. "
        "Finish with the final answer in \\boxed{}."
    )


def load_maths(source: str, *, limit: int | None = None) -> list[Prompt]:
    """Problems with final answers, from a file or the hub.

    Args:
        source: a ``.jsonl`` or ``.parquet`` file; a folder of them, e.g. a downloaded data set of the Hugging Face
            hub; or ``hub:OWNER/DATASET/PATH`` for such a file of a data set on the hub, e.g.
            ``hub:BytedTsinghua-SIA/DAPO-Math-17k/data/dapo-math-17k.parquet``.
        limit: number of different problems to take, from the start.

    Returns:
        Prompts whose label is the answer. Repeated problems (DAPO's file has each 100 times) are taken once.

    Raises:
        ConfigError: a missing file, a failed download, or a row of another shape, with its number.
    """
    prompts: dict[str, Prompt] = {}
    for path in _files(source):
        for number, row in enumerate(_rows(path), 1):
            if limit is not None and len(prompts) >= limit:
                break
            prompt = _prompt(row, f"{path}, row {number}")
            prompts.setdefault("\n".join(message.content for message in prompt.messages), prompt)
    if not prompts:
        raise ConfigError.of("data", str(source), "at least one row")
    return list(prompts.values())


def _files(source: str) -> list[Path]:
    named = _HUB.fullmatch(str(source))
    if named is None:
        path = Path(source)
        found = sorted(path.rglob("*")) if path.is_dir() else [path]
        found = [file for file in found if file.is_file() and file.suffix in _KINDS]
        if not found:
            raise ConfigError.of(
                "data", str(source), "a .jsonl or .parquet file, a folder of them, or hub:OWNER/DATASET/PATH of one"
            )
        return found
    hub: Any = importlib.import_module("huggingface_hub")  # transformers brings it
    try:
        return [Path(hub.hf_hub_download(repo_id=named[1], filename=named[2], repo_type="dataset"))]
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(f"data: got {source!r}, which the hub does not give ({reason})") from error


def _rows(path: Path) -> Iterator[Any]:
    if path.suffix == ".parquet":
        if importlib.util.find_spec("pyarrow") is None:
            raise ConfigError.of("data", str(path), f"a .jsonl file, or {install_command('parquet')}")
        parquet: Any = importlib.import_module("pyarrow.parquet")
        try:
            with parquet.ParquetFile(path) as file:
                for batch in file.iter_batches():
                    yield from batch.to_pylist()
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: not Parquet ({error})") from error
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield msgspec.json.decode(line)
                except msgspec.DecodeError as error:
                    raise ConfigError(f"{path}, line {number}: not JSON ({error})") from None


def _prompt(row: Any, place: str) -> Prompt:
    if not isinstance(row, Mapping):
        raise ConfigError.of(place, row, f"an object with {_EXPECTED}")
    plain = {key.lower(): value for key, value in row.items()}
    model = plain.get("reward_model")
    truth = model.get("ground_truth") if isinstance(model, Mapping) else None
    asked = plain.get("prompt", plain.get("problem"))
    answer = next((value for value in (plain.get("label"), truth, plain.get("answer")) if value is not None), None)
    if not asked or answer is None or not str(answer).strip():
        raise ConfigError.of(place, sorted(row), _EXPECTED)
    metadata = plain.get("metadata")
    try:
        return Prompt(as_messages(asked), str(answer).strip(), metadata if isinstance(metadata, Mapping) else {})
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"{place}: {error}") from None
