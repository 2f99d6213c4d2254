"""Tests of the adapters for trainers, each with the real package: ``scripts/test --trainers [--discard] [NAME …]``.

:data:`TRAINERS` is the table of the environments; a trainer is a line of it and its test file. The environments are
``.venv-trainer-NAME``, made one after another; a complete environment is used again, unless ``--discard`` removes each
after its tests. A trainer that cannot run here is named with the reason.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

ROOT = Path(__file__).parents[2]
VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"

_DOORS = "tests/integrations/test_doors.py"


@attrs.frozen
class Trainer:
    """One environment, on the torch of this project, and on its transformers unless ``packages`` names another."""

    tests: tuple[str, ...]
    """Test files and options of pytest."""
    packages: tuple[str, ...] = ()
    """Packages that pip installs with dependencies."""
    no_deps: tuple[str, ...] = ()
    """Packages without dependencies: theirs need CUDA, or pin versions that exclude each other."""
    stubs: tuple[str, ...] = ()
    """Packages that are imported and not used: empty modules in their place."""
    python: str | None = None
    """The version of Python that it needs; by default that of this project's environment."""
    checkout: str | None = None
    """The environment variable that names a checkout, of a trainer that is not on PyPI."""
    sources: tuple[str, ...] = ()
    """Folders of the checkout that are imported from."""

    def lacks(self, variables: Mapping[str, str]) -> str:
        """The requirements that these environment variables do not give, as text; empty if none."""
        if self.checkout is not None and not Path(variables.get(self.checkout, "") or "/nowhere").is_dir():
            return f"{self.checkout}: got {variables.get(self.checkout)!r}; expected a checkout of it"
        if self.python is not None and interpreter(self.python, variables) is None:
            return f"Python {self.python}: not found; PYTHON may name it"
        return ""


TRAINERS: dict[str, Trainer] = {
    "verl": Trainer(
        tests=("tests/integrations/test_verl.py", "tests/integrations/test_exports.py", _DOORS),
        packages=(
            "tensordict==0.10.0", "ray", "hydra-core", "peft", "datasets", "accelerate", "codetiming", "dill", "pandas",
            "pillow", "torchdata", "orjson", "cachetools", "fastapi", "uvicorn", "TransferQueue==0.1.11",
            "transformers==5.9.0",  # as verl pins it; later processors refuse its texts, which lack the placeholders
        ),
        no_deps=("verl==0.9.1",),
    ),
    "areal": Trainer(
        tests=("tests/integrations/test_areal.py", "tests/integrations/test_exports.py", _DOORS),
        packages=(
            "aiofiles", "colorlog", "datasets", "einops", "flask", "httpx", "hydra-core", "lark", "numba", "omegaconf",
            "openai", "orjson", "pandas", "peft", "pillow", "pybase64", "ray", "tabulate", "tenacity", "tensorboardX",
            "torchdata", "uvloop", "transformers==5.3.0",  # the newest that AReaL allows
        ),
        no_deps=("areal==1.0.4",),
        stubs=("swanlab", "trackio", "wandb"),
    ),
    "tinker": Trainer(
        tests=("tests/integrations/test_tinker.py", "tests/integrations/test_steps.py", _DOORS),
        packages=("tinker==0.38.0", "blobfile", "chz", "datasets", "pillow"),
        no_deps=("tinker-cookbook==0.6.1",),
        stubs=("tml_renderers",),
    ),
    "skyrl": Trainer(
        tests=("tests/integrations/test_skyrl.py",),
        packages=(
            "skyrl-gym==0.4.0", "omegaconf", "hydra-core", "loguru", "ray", "tensordict", "jaxtyping", "torchdata",
            "func_timeout", "polars", "httpx", "peft", "datasets", "pillow",
            "transformers==5.8.0",  # the newest that SkyRL allows
        ),
        no_deps=("skyrl==0.3.0",),
        python="3.12",
    ),
    "openrlhf": Trainer(
        tests=("tests/integrations/test_openrlhf.py",),
        packages=(
            "datasets", "einops", "optree", "peft", "pylatexenc", "ray", "tqdm",
            "transformers==5.15.0",  # as OpenRLHF pins it
        ),
        no_deps=("openrlhf==0.11.2",),
    ),
    "prime-rl": Trainer(
        tests=("tests/integrations/test_prime_rl.py", "tests/integrations/test_exports.py"),
        packages=("beartype", "jaxtyping", "loguru", "pyzmq", "verifiers==0.4.0"),
        stubs=("wandb",),
        checkout="PRIME_RL_PATH",
        sources=("src", "packages/prime-rl-configs/src"),
    ),
    "nemo": Trainer(
        tests=("-s", "tests/integrations/test_nemo_rl.py", "tests/audit/readers/test_nemo_rl.py"),
        packages=("datasets", "omegaconf", "pillow", "ray", "tensordict", "tqdm"),
        checkout="NEMO_RL_PATH",
        sources=("",),
    ),
    "rllm": Trainer(
        tests=("tests/integrations/test_rllm.py", "tests/integrations/test_steps.py", _DOORS),
        packages=("codetiming", "omegaconf", "openai", "tqdm"),
        checkout="RLLM_PATH",
        sources=("",),
    ),
    "trl": Trainer(
        tests=("tests/integration/test_curated_trl.py",),
        packages=("trl==1.16.0", "accelerate", "datasets", "requests", "pyarrow"),
    ),
    "axolotl": Trainer(
        tests=("tests/integration/test_curated_axolotl.py",),
        packages=(
            "datasets", "addict", "colorama", "accelerate", "fire", "numba", "peft", "posthog", "pyarrow", "pydantic",
            "python-dotenv", "trl==1.16.0",
        ),
        no_deps=("axolotl==0.19.0",),  # the newest for Python 3.11; it requires CUDA wheels
    ),
    "llamafactory": Trainer(
        tests=("tests/integration/test_curated_llamafactory.py",),
        packages=("datasets", "accelerate", "omegaconf", "peft", "pyarrow", "trl==0.24.0"),
        no_deps=("llamafactory==0.9.5",),  # it requires older transformers
        stubs=("torchaudio",),
    ),
    "dumps": Trainer(
        tests=("-s", "tests/audit/readers"),
        packages=("trl==1.16.0", "accelerate", "datasets", "requests", "pyarrow", "verifiers==0.4.0"),
    ),
    "environments": Trainer(
        tests=("-m", "extra", "tests/environments/adapters"),
        packages=("gymnasium==1.4.0", "openenv-core==0.3.0", "skyrl-gym==0.4.0", "verifiers==0.4.0"),
    ),
}  # fmt: skip


def interpreter(version: str, variables: Mapping[str, str]) -> str | None:
    """The interpreter of this version: ``PYTHON``, this one, one on the path, or one of pyenv; ``None`` without any."""
    pyenv = Path(variables.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    name = f"python{version}"
    known = (
        variables.get("PYTHON"),
        sys.executable,
        shutil.which(name),
        *sorted(pyenv.glob(f"{version}.*/bin/{name}")),
    )
    ask = "import sys; print('%d.%d' % sys.version_info[:2])"
    for each in known:
        path = shutil.which(each) if each else None
        if path and subprocess.run([path, "-c", ask], capture_output=True, text=True).stdout.strip() == version:
            return str(path)
    return None


def folder_of(name: str) -> Path:
    """The folder of a trainer's environment."""
    return ROOT / f".venv-trainer-{name}"


def environment(name: str, trainer: Trainer) -> Path:
    """Make the environment of a trainer, unless it is complete; returns its interpreter.

    Behind its own packages it shows those of this environment, or of ``.venv-VERSION`` for another version of Python.
    """
    folder = folder_of(name)
    python = folder / "bin" / "python"
    stamp = folder / f"installed-{hashlib.sha256(repr(attrs.evolve(trainer, tests=())).encode()).hexdigest()[:12]}"
    if stamp.exists():
        return python
    base = Path(sys.executable)
    if trainer.python not in (None, VERSION):
        base = ROOT / f".venv-{trainer.python}" / "bin" / "python"
        named = {"PYTHON": str(interpreter(trainer.python, os.environ)), "VENV": base.parts[-3]}
        subprocess.run(["scripts/install", "engine,parquet,test"], cwd=ROOT, check=True, env={**os.environ, **named})
    subprocess.run([str(base), "-m", "venv", "--without-pip", str(folder)], check=True)
    shown = f"import site; site.addsitedir({str(_packages_of(base))!r})\n"
    (_packages_of(python) / "rollouts-packages.pth").write_text(shown)
    print(f"scripts/test: installing {' '.join(trainer.no_deps or trainer.packages)} into {folder.name}", flush=True)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check"]
    for options, wanted in (((), trainer.packages), (("--no-deps",), trainer.no_deps)):
        if wanted:
            command = [*pip, *options, *wanted]
            done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
            if done.returncode:  # else it warns of folders that are an index and lack a package
                sys.exit(f"{done.stderr}scripts/test: pip failed; {folder.name} is not complete")
    for stub in trainer.stubs:
        (_packages_of(python) / f"{stub}.py").write_text('"""Stands for a package that the tests do not use."""\n')
    stamp.touch()
    return python


def _packages_of(python: Path) -> Path:
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True).stdout.strip())


def table(lines: Sequence[Sequence[object]]) -> str:
    """Lines as aligned columns under their titles."""
    rows = [
        ("trainer", "direction", "compared", "worst", "note"),
        *((*line[:3], f"{line[3]:.1e}", line[4]) for line in lines),
    ]
    widths = [max(len(str(row[column])) for row in rows) for column in range(5)]
    return "\n".join(
        "  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def main(arguments: Sequence[str]) -> int:
    """Run the tests of these trainers, or of all; prints the table of what was compared, and who was not run."""
    names = [argument for argument in arguments if argument != "--discard"]
    for name in names:
        if name not in TRAINERS:
            print(f"scripts/test --trainers: got {name!r}; expected one of {', '.join(TRAINERS)}", file=sys.stderr)
            return 2
    lacking = {name: TRAINERS[name].lacks(os.environ) for name in names or TRAINERS}
    failed = [name for name, what in lacking.items() if what and names]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "table.jsonl"
        for name in [name for name, what in lacking.items() if not what]:
            trainer = TRAINERS[name]
            variables = {**os.environ, "ROLLOUTS_TRAINER_TABLE": str(file)}
            if trainer.checkout is not None:
                checkout = Path(os.environ[trainer.checkout]).resolve()
                variables["PYTHONPATH"] = os.pathsep.join(str(checkout / folder) for folder in trainer.sources)
            python = environment(name, trainer)
            tests = [str(python), "-m", "pytest", "-q", "-rs", "-m", "trainer", *trainer.tests]
            if subprocess.run(tests, cwd=ROOT, env=variables, check=False).returncode:
                failed.append(name)
            if len(names) < len(arguments):
                shutil.rmtree(folder_of(name))
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    print(table(lines))
    for name, what in lacking.items():
        if what:
            print(f"scripts/test --trainers: {name} was not run: {what}", file=sys.stderr)
    if failed:
        print(f"scripts/test --trainers: failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
