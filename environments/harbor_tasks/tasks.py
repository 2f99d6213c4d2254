"""Task folders in Harbor's format, written to a folder: the ten repositories, and six tasks of special parts.

    python -m rollouts.recipes.environments.harbor_tasks.tasks FOLDER --image python:3.12-slim

They need Python and bash in their image, and nothing is installed.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from rollouts.programs.launchers.repository_task import Files, RepositoryTask
from rollouts.recipes.environments.repositories.tasks import SOLUTIONS, TASKS

__all__ = ["SPECIAL", "main", "write_tasks"]

_TEST = """#!/bin/bash
python3 -I -B /tests/run.py {names} > /logs/verifier/reward.json
"""
_RUN = """import contextlib, io, json, os, sys, unittest

sys.path[:0] = ["/tests", os.getcwd()]
passed = 0
for name in sys.argv[1:]:
    result = unittest.TestResult()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(Exception):
        unittest.defaultTestLoader.loadTestsFromName(name).run(result)
    passed += result.wasSuccessful() and result.testsRun > 0
tests = len(sys.argv) - 1
print(json.dumps({"reward": int(passed == tests), "passed": passed / tests}))
"""
_REWARD = """#!/bin/bash
if {condition}; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
_SERVER = """import http.server, pathlib

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"ready")

    def log_message(self, *args):
        pass

http.server.HTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
"""
_ASK = "python3 -I -c \"import urllib.request as r; print(r.urlopen('http://127.0.0.1:8000').read().decode())\""


def _toml(image: str, *, top: str = "", environment: str = "", rest: str = "") -> str:
    lines = ['schema_version = "1.4"', top, "[environment]", 'network_mode = "no-network"']
    lines += [f'docker_image = "{image}"', 'workdir = "/app"', environment, rest]
    return "\n".join(line for line in lines if line) + "\n"


def _repository(task: RepositoryTask, image: str) -> dict[str, str]:
    assert isinstance(task.source, Files)
    names = " ".join([*task.fail_to_pass, *task.pass_to_pass])
    files = {
        "task.toml": _toml(image, rest="[verifier]\ntimeout_sec = 60\n[agent]\ntimeout_sec = 1800"),
        "instruction.md": f"{task.problem}\n\nThe code is in the working folder.\n",
        "tests/test.sh": _TEST.format(names=names),
        "tests/run.py": _RUN,
    }
    for path, data in task.source.files.items():
        files[f"environment/{path}"] = data.decode()
    for path, data in task.test_files.items():
        files[f"tests/{path}"] = data.decode()
    files["solution/fixed.py"] = SOLUTIONS[task.name]
    files["solution/solve.sh"] = f"#!/bin/bash\ncp /solution/fixed.py {task.name}.py\n"
    return files


def _special(image: str) -> dict[str, dict[str, str]]:
    def task(instruction: str, solution: str, condition: str, toml: str, **further: str) -> dict[str, str]:
        return {
            "task.toml": toml,
            "instruction.md": instruction + "\n",
            "solution/solve.sh": f"#!/bin/bash\n{solution}\n",
            "tests/test.sh": _REWARD.format(condition=condition),
            "environment/README.md": "The working folder of the task.\n",
            **{path.replace("__", "/"): text for path, text in further.items()},
        }

    steps = task(
        "", "true", "true", _toml(image, rest='[[steps]]\nname = "one"\nmin_reward = 1.0\n[[steps]]\nname = "two"')
    )
    for name, instruction, solution, condition in (
        ("one", "Write the word one to one.txt.", "echo one > one.txt", '[ "$(cat one.txt)" = one ]'),
        ("two", "Copy one.txt to two.txt.", "cp one.txt two.txt", '[ "$(cat two.txt)" = one ]'),
    ):
        steps[f"steps/{name}/instruction.md"] = f"{instruction}\n"
        steps[f"steps/{name}/solution/solve.sh"] = f"#!/bin/bash\n{solution}\n"
        steps[f"steps/{name}/tests/test.sh"] = _REWARD.format(condition=condition)
    del steps["instruction.md"], steps["tests/test.sh"], steps["solution/solve.sh"]
    return {
        "server": task(
            "Start server.py, so that it still answers on port 8000 of 127.0.0.1 when you have finished.",
            "setsid nohup python3 server.py > /dev/null 2>&1 &\n"
            f"for _ in $(seq 50); do {_ASK} > /dev/null 2>&1 && break; sleep 0.1; done",
            f'[ "$({_ASK} 2> /dev/null)" = ready ]',
            _toml(image),
            **{"environment/server.py": _SERVER},
        ),
        "separate": task(
            "Write the sum of the numbers in README.md, 0, to sum.txt.",
            "echo 0 > sum.txt",
            '[ "$(cat /app/sum.txt)" = 0 ]',
            _toml(image, top='artifacts = ["/app/sum.txt"]', rest='[verifier]\nenvironment_mode = "separate"'),
        ),
        "steps": steps,
        "collect": task(
            "Write your name to /tmp/name.txt.",
            "echo agent > /tmp/name.txt",
            '[ "$(cat /logs/artifacts/name.txt)" = agent ]',
            _toml(image, rest='[[verifier.collect]]\ncommand = "cp /tmp/name.txt /logs/artifacts/name.txt"'),
        ),
        "healthcheck": task(
            "Copy ready.txt to done.txt.",
            "cp ready.txt done.txt",
            "[ -f done.txt ]",
            _toml(
                image,
                rest="[environment.healthcheck]\n"
                'command = "echo up >> ready.txt; [ $(wc -l < ready.txt) -ge 2 ]"\ninterval_sec = 0.1',
            ),
        ),
        "closed": task(
            "Write to network.txt whether the internet can be reached: yes or no.",
            "echo no > network.txt",
            '[ "$(cat network.txt)" = no ]',
            _toml(image),
        ),
    }


SPECIAL = ("closed", "collect", "healthcheck", "separate", "server", "steps")
"""The names of the special tasks."""


def write_tasks(folder: str | Path, image: str) -> list[Path]:
    """Write all tasks below a folder; returns the folders of the tasks.

    Args:
        folder: made where it is missing.
        image: the name of the image of all tasks on this machine.
    """
    tasks = {name: _repository(task, image) for name, task in TASKS.items()} | _special(image)
    for name, files in tasks.items():
        _write(Path(folder) / name, files)
    return [Path(folder) / name for name in sorted(tasks)]


def _write(folder: Path, files: Mapping[str, str]) -> None:
    for path, text in files.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        file.chmod(0o755 if path.endswith(".sh") else 0o644)


def main(arguments: list[str] | None = None) -> int:
    """Write the tasks that the command line asks for."""
    parser = argparse.ArgumentParser(description="Write sixteen tasks in Harbor's format.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--image", default="python:3.12-slim", help="the image of all tasks (default: %(default)s)")
    args = parser.parse_args(arguments)
    write_tasks(args.folder, args.image)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
