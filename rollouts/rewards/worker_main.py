"""The worker process of :mod:`rollouts.rewards.processes`: a script that calls functions on request.

Invariant: every request has one response, ``(True, value)`` or ``(False, message, traceback)``, whatever the function
raises. Its output to stdout is discarded. The process ends with its input. It imports only the modules of the requested
functions, so that it starts fast.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback

LENGTH_BYTES = 8
"""A message is the length of a pickle, big-endian, then the pickle."""


def serve() -> None:
    """Answer requests until the input ends."""
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    while True:
        head = source.read(LENGTH_BYTES)
        if len(head) < LENGTH_BYTES:
            return
        request = source.read(int.from_bytes(head, "big"))
        try:
            function, arguments = pickle.loads(request)
            response = pickle.dumps((True, function(*arguments)))
        except BaseException as error:  # noqa: BLE001 - SystemExit too: it would end the process
            name = type(error).__name__
            raised = "" if name == "RewardFailure" else f" raised {name}"
            response = pickle.dumps((False, f"{raised}: {error}", traceback.format_exc()))
        sink.write(len(response).to_bytes(LENGTH_BYTES, "big") + response)
        sink.flush()


if __name__ == "__main__":
    serve()
