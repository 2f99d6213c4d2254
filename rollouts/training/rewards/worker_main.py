"""The other side of :mod:`rollouts.training.rewards.processes`: a script that calls what it is told to.

Invariant: every request has one answer, ``(True, value)`` or ``(False, words, traceback)``, whatever the function did;
what it prints goes nowhere. When its input ends the process does. It imports the modules of the functions, and nothing
else of the package, so that it starts fast.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback

LENGTH_BYTES = 8
"""Each message is its length, big-endian, and as many bytes of pickle."""


def serve() -> None:
    """Answer requests until there are none."""
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    while True:
        head = source.read(LENGTH_BYTES)
        if len(head) < LENGTH_BYTES:
            return
        request = source.read(int.from_bytes(head, "big"))
        try:
            function, arguments = pickle.loads(request)
            answer = pickle.dumps((True, function(*arguments)))
        except BaseException as error:  # noqa: BLE001 - SystemExit too: it would end the process
            name = type(error).__name__
            raised = "" if name == "RewardFailure" else f" raised {name}"
            answer = pickle.dumps((False, f"{raised}: {error}", traceback.format_exc()))
        sink.write(len(answer).to_bytes(LENGTH_BYTES, "big") + answer)
        sink.flush()


if __name__ == "__main__":
    serve()
