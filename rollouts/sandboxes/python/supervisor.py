"""The supervisor: a small process that starts, watches and kills the untrusted program.

Invariant: when the supervisor has answered, or its lifeline pipe is closed, no process and no file of the program is
left. It stores the beginning of each output and discards the rest, so its memory is bounded.

It uses the standard library only and starts without the packages that rollouts needs (:data:`BOOT`), in milliseconds.
It knows only the request: it has none of the parent's environment variables and descriptors.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
import time
from typing import Any

from rollouts.sandboxes import kernel
from rollouts.sandboxes.python.child import INNER_USER, enter, outer_user
from rollouts.sandboxes.removal import remove_tree

__all__ = ["BOOT", "main"]

BOOT = """
import sys, types
for name in ("rollouts", "rollouts.sandboxes"):
    sys.modules[name] = module = types.ModuleType(name)
    module.__path__ = [sys.argv[1]] if name.endswith("sandboxes") else []
from rollouts.sandboxes.python.supervisor import main
main(int(sys.argv[2]))
"""
"""Program text with two arguments, the folder ``sandboxes`` and the lifeline's descriptor. It imports this module
without ``rollouts`` and ``rollouts.sandboxes``, and so without their imports."""

_SETUP_SECONDS = 30.0
_CHUNK = 1 << 16


def main(lifeline: int) -> None:
    """Read one request from standard input, serve it, and write the answer to standard output."""
    request = json.loads(sys.stdin.buffer.readline())
    code = sys.stdin.buffer.read(request["code_bytes"])
    data = sys.stdin.buffer.read(request["stdin_bytes"])
    request["linux"] = sys.platform == "linux"
    if request["linux"]:
        kernel.become_subreaper()
    folder = request["folder"]
    try:
        answer, outputs = _Watch(request, folder, code, data, lifeline).run()
    finally:
        remove_tree(folder)
    answer["sizes"] = [len(output) for output in outputs]
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n" + b"".join(outputs))
    sys.stdout.buffer.flush()


class _Watch:
    """One program, from its start until all its processes are gone."""

    def __init__(self, request: dict[str, Any], folder: str, code: bytes, data: bytes, lifeline: int) -> None:
        self.request = request
        self.unwritten = memoryview(data)
        self.outputs = [bytearray(), bytearray()]
        self.truncated = [False, False]
        self.report: dict[str, Any] = {"images": []}
        self.partial_line = bytearray()
        self.cut_off = False
        self.began = time.monotonic()
        self.deadline = self.began + _SETUP_SECONDS

        to_program, self.stdin = os.pipe()
        self.streams = [os.pipe(), os.pipe()]
        self.status, status = os.pipe()
        go, self.go = os.pipe()
        theirs = (to_program, self.streams[0][1], self.streams[1][1])
        self.gate = os.fork()
        if self.gate == 0:
            ours = (self.stdin, self.go, self.status, lifeline, self.streams[0][0], self.streams[1][0])
            enter(request, folder, code, theirs, status, go, ours)
        for number in (*theirs, status, go, *request["channel"]):
            os.close(number)

        self.selector = selectors.DefaultSelector()
        self.selector.register(lifeline, selectors.EVENT_READ, self._lifeline_closed)
        self.selector.register(self.status, selectors.EVENT_READ, self._read_status)
        for which, (readable, _) in enumerate(self.streams):
            os.set_blocking(readable, False)
            self.selector.register(readable, selectors.EVENT_READ, lambda which=which: self._read(which))
        os.set_blocking(self.stdin, False)
        self.selector.register(self.stdin, selectors.EVENT_WRITE, self._write)

    def run(self) -> tuple[dict[str, Any], list[bytes]]:
        timed_out = False
        try:
            while not (self.cut_off or "exit" in self.report or "broken" in self.report):
                left = self.deadline - time.monotonic()
                if left <= 0:
                    timed_out = True
                    break
                for key, _ in self.selector.select(left):
                    key.data()
            seconds = time.monotonic() - self.began
        finally:
            self._kill_all()
        for which in (0, 1):
            while self._read(which):
                pass
        if timed_out and "begun" not in self.report:
            self.report["broken"] = f"the program did not start within {_SETUP_SECONDS:g} s"
        code = self.report.get("exit", -signal.SIGKILL)
        used_up = self.report.get("cpu", 0.0) >= self.request["cpu_seconds"]
        out_of_cpu = code == -signal.SIGXCPU or (code == -signal.SIGKILL and used_up)
        answer = {
            "broken": self.report.get("broken"),
            "unreadable": self.report.get("unreadable", False),
            "mechanisms": self.report.get("begun", []),
            "exit_code": code,
            "timed_out": timed_out or out_of_cpu,
            "truncated": any(self.truncated),
            "seconds": seconds,
            "images": self.report["images"] if "exit" in self.report else [],
            "more_images": self.report.get("more_images", 0),
        }
        return answer, [bytes(output) for output in self.outputs]

    # -- events --

    def _lifeline_closed(self) -> None:
        self.cut_off = True

    def _read_status(self) -> None:
        data = os.read(self.status, _CHUNK)
        if not data:
            self.report.setdefault("exit", -signal.SIGKILL)  # init was killed with it
            return
        self.partial_line += data
        if b"\n" not in data:
            return
        *lines, self.partial_line = self.partial_line.split(b"\n")
        for line in lines:
            report = json.loads(line)
            if "image" in report:
                self.report["images"].append(report.pop("image"))
            self.report |= report
            if "unshared" in self.report:
                self._map_users(self.report.pop("unshared"))
            if "begun" in report:
                self.began = time.monotonic()
                self.deadline = self.began + self.request["seconds"]

    def _map_users(self, gate: int) -> None:
        """Map the namespace's users to users outside. Root stays root during the setup; the program is never root."""
        user, group = os.geteuid(), os.getegid()
        inner = INNER_USER
        try:
            if user == 0:
                maps = [f"0 0 1\n{inner} {outer_user()} 1\n"] * 2
            else:
                _write(f"/proc/{gate}/setgroups", "deny")
                maps = [f"{inner} {user} 1\n", f"{inner} {group} 1\n"]
            _write(f"/proc/{gate}/uid_map", maps[0])
            _write(f"/proc/{gate}/gid_map", maps[1])
            os.write(self.go, b"g")
        except OSError as error:
            self.report["broken"] = f"user namespace: {error}"

    def _read(self, which: int) -> bool:
        """Read what is available; return whether there was anything."""
        source = self.streams[which][0]
        try:
            data = os.read(source, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            if source in self.selector.get_map():
                self.selector.unregister(source)
            return False
        output = self.outputs[which]
        room = self.request["output_bytes"] - len(output)
        output += data[:room]
        self.truncated[which] |= len(data) > room
        return True

    def _write(self) -> None:
        try:
            if self.unwritten:
                self.unwritten = self.unwritten[os.write(self.stdin, self.unwritten[:_CHUNK]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self.unwritten = self.unwritten[:0]
        if not self.unwritten:
            self.selector.unregister(self.stdin)
            os.close(self.stdin)

    # -- the end --

    def _kill_all(self) -> None:
        """Kill the gate with its process group, then each orphan that becomes our child, until none is left."""
        with _no_such_process():
            os.killpg(self.gate, signal.SIGKILL)
        with _no_such_process():
            os.kill(self.gate, signal.SIGKILL)  # it may not have had a group yet
        os.waitpid(self.gate, 0)
        while True:
            for child in _children():
                with _no_such_process():
                    os.kill(child, signal.SIGKILL)
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    time.sleep(0.001)
            except ChildProcessError:
                return


class _no_such_process:  # noqa: N801 - named like contextlib.suppress, after the error that it suppresses
    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return kind is not None and issubclass(kind, ProcessLookupError | PermissionError)


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(number) for number in file.read().split()]
    except OSError:
        return []


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
