"""The consumer's side of a service, on the standard library alone: this file may be copied into a trainer.

Where msgspec is installed, as with this package, it decodes the fields, in a tenth of the time.

    for batch in Rollouts("http://127.0.0.1:8700").batches(groups=32):
        train(batch.samples)
        batch.ack(step=step)

Invariant: every request may be repeated without effect, so a lost connection or a restarted service is waited for, up
to ``patience`` seconds. A batch whose lease has ended raises :class:`LeaseLost` at ``ack``: its groups will come again.
Threads may share a :class:`Rollouts`.
"""

from __future__ import annotations

import http.client
import json
import os
import struct
import sys
import time
import urllib.parse
import uuid
from collections.abc import Iterator
from types import TracebackType
from typing import Any

try:
    import msgspec
except ImportError:
    msgspec = None  # type: ignore[assignment]

__all__ = ["Batch", "LeaseLost", "Rollouts", "ServiceError", "ServiceSample"]

_KEY = "ROLLOUTS_SERVICE_KEY"
_RETRIED = (502, 503, 504)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 5.0
_ANSWER_SECONDS = 120.0
"""Longest wait for an answer, in addition to the wait that the request asks for."""


class ServiceError(Exception):
    """The service refused a request, its run failed, or it did not answer for too long.

    Attributes:
        status: of the HTTP answer; 0 without one.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class LeaseLost(ServiceError):
    """The lease of a batch has ended, and its groups are ready again or belong to another consumer."""


class ServiceSample:
    """One rollout, or one branch of a rollout.

    Attributes:
        fields: the sample's fields as plain data by name: ``reward``, ``group_index``, ``versions``, ``metadata``, ….
        tokens: int32, shape ``(n,)``: prompt and response ids.
        loss_mask: bool, shape ``(n,)``: 1 where the policy sampled the token.
        rollout_log_probs: float32, shape ``(n,)``, or ``None``.

    The columns are views of the received bytes: ``numpy.asarray(sample.tokens)`` copies nothing.
    """

    def __init__(self, fields: dict[str, Any], columns: memoryview) -> None:
        count, has_logprobs = fields.pop("columns")
        self.fields = fields
        self.tokens = columns[: 4 * count].cast("i")
        self.loss_mask = columns[4 * count : 5 * count].cast("?")
        self.rollout_log_probs = columns[5 * count : 9 * count].cast("f") if has_logprobs else None

    def __repr__(self) -> str:
        return f"<ServiceSample group {self.group_index} · index {self.fields['index']}: {len(self.tokens)} tokens>"

    @property
    def reward(self) -> float | None:
        value: float | None = self.fields["reward"]
        return value

    @property
    def group_index(self) -> int:
        value: int = self.fields["group_index"]
        return value


class Batch:
    """Whole groups that this consumer has leased.

    Attributes:
        token: of the lease.
        groups: indices of the groups, in order.
        body: the bytes as received.
    """

    def __init__(self, service: Rollouts, body: bytes) -> None:
        self._service = service
        self.body = body
        self._samples: list[ServiceSample] | None = None
        head, _ = next(_records(memoryview(body)))
        self.token: int = head["token"]
        self.groups: tuple[int, ...] = tuple(head["groups"])
        self._count: int = head["samples"]

    def __repr__(self) -> str:
        return f"<Batch {self.token}: {len(self.groups)} groups, {self._count} samples>"

    @property
    def samples(self) -> list[ServiceSample]:
        """The samples of whole groups, by group, then by rollout; decoded at the first read."""
        if self._samples is None:
            tools: dict[int, str] = {}
            samples = []
            for fields, columns in _records(memoryview(self.body)):
                if fields["kind"] == "tools":
                    tools[fields["number"]] = fields["tools"]
                elif fields["kind"] == "sample":
                    values = fields["sample"]
                    if values["tools"] is not None:
                        values["tools"] = tools[values["tools"]]
                    samples.append(ServiceSample({**values, "columns": fields["columns"]}, columns))
            self._samples = samples
        return self._samples

    @property
    def images(self) -> dict[str, bytes]:
        """The bytes of the images that samples name, by SHA-256."""
        records = _records(memoryview(self.body))
        return {fields["sha256"]: fields["data"] for fields, _ in records if fields["kind"] == "image"}

    def ack(self, step: int | None = None) -> None:
        """Acknowledge that the batch was trained on; returns when the service has it on disk.

        Raises:
            LeaseLost: the lease has ended.
        """
        self._service.ack(self.token, step=step)

    def renew(self, lease_seconds: float = 600.0) -> None:
        """Let the lease end some seconds from now; raises LeaseLost."""
        self._service.renew(self.token, lease_seconds)

    def release(self) -> None:
        """Return the groups; does nothing if the lease has ended."""
        self._service.release(self.token)


class Rollouts:
    """A connection to a service.

    Args:
        url: of ``rollouts up``.
        key: the service's key; by default that in ROLLOUTS_SERVICE_KEY.
        consumer: a name for :meth:`held`.
        patience: seconds for which a service that does not answer is asked again.
    """

    def __init__(self, url: str, *, key: str | None = None, consumer: str = "", patience: float = 300.0) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url: got {url!r}; expected http://HOST:PORT")
        if sys.byteorder != "little":
            raise RuntimeError("columns are little-endian, and this machine is not")
        self._https, self._address, self._base = parts.scheme == "https", parts.netloc, parts.path.rstrip("/")
        self._key = os.environ.get(_KEY) if key is None else key
        self._idle: list[http.client.HTTPConnection] = []
        self.url, self.consumer, self.patience = url, consumer, patience

    def __repr__(self) -> str:
        return f"<Rollouts {self.url}>"

    def __enter__(self) -> Rollouts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections that no request uses; the next request opens another."""
        while self._idle:
            self._idle.pop().close()

    def batches(self, groups: int, *, lease_seconds: float = 600.0) -> Iterator[Batch]:
        """Yield batches of ``groups`` whole groups until every group is acknowledged or dropped.

        The last batch may have fewer. A batch must be acknowledged or released within ``lease_seconds``, or renewed.

        Raises:
            ServiceError: the run failed, the request is invalid, or the service did not answer for too long.
        """
        while True:
            try:
                batch = self.take(groups, lease_seconds=lease_seconds, wait_seconds=30.0)
            except ServiceError as error:
                if error.status == 410:
                    return
                raise
            if batch is not None:
                yield batch

    def take(self, groups: int, *, lease_seconds: float = 600.0, wait_seconds: float = 0.0) -> Batch | None:
        """Lease groups; ``None`` if too few were ready within ``wait_seconds``.

        Raises:
            ServiceError: as :meth:`batches`; with status 410 after the end of the data.
        """
        ends = time.monotonic() + wait_seconds
        while True:
            left = max(0.0, ends - time.monotonic())
            request = {
                "groups": groups,
                "lease_s": lease_seconds,
                "wait_s": left,
                "consumer": self.consumer,
                "request": uuid.uuid4().hex,  # a repeated request gets the same lease
            }
            status, body = self._send("POST", "/v1/leases", request, seconds=left)
            if status == 200:
                return Batch(self, body)
            if time.monotonic() >= ends:  # the service waits a minute at most
                return None

    def ack(self, token: int, *, step: int | None = None) -> None:
        """Acknowledge a lease, also one of an earlier process; raises LeaseLost."""
        self._send("POST", f"/v1/leases/{token}/ack", {"step": step})

    def renew(self, token: int, lease_seconds: float = 600.0) -> None:
        """Let a lease end some seconds from now; raises LeaseLost."""
        self._send("POST", f"/v1/leases/{token}/renew", {"lease_s": lease_seconds})

    def release(self, token: int) -> None:
        """Return the groups of a lease; does nothing if it has ended."""
        try:
            self._send("POST", f"/v1/leases/{token}/release", {})
        except LeaseLost:
            return

    def held(self) -> list[dict[str, Any]]:
        """``token`` and ``groups`` of the leases that this consumer has, e.g. after its restart."""
        query = urllib.parse.urlencode({"consumer": self.consumer})
        leases: list[dict[str, Any]] = json.loads(self._send("GET", f"/v1/leases?{query}")[1])["leases"]
        return leases

    def again(self, token: int) -> Batch:
        """The batch of a lease that this consumer has; raises LeaseLost."""
        return Batch(self, self._send("GET", f"/v1/leases/{token}")[1])

    def publish(self, version: str, path: str | os.PathLike[str] | None = None, *, while_running: str = "") -> None:
        """Announce the next version of the weights, and let the servers load it.

        Args:
            version: a new name; the last one may be repeated.
            path: folder of the weights, which the servers can read; ``None`` if the trainer gives the servers the
                weights itself, after this call.
            while_running: what happens to requests in flight, as for :func:`rollouts.inference.weights.update_weights`.

        Raises:
            ServiceError: an earlier version (409), or the servers did not load the weights (502): publish it again.
        """
        request: dict[str, Any] = {"name": version, "path": None if path is None else os.fspath(path)}
        if while_running:
            request["while_running"] = while_running
        self._send("POST", "/v1/versions", request, seconds=1800.0, retried=(503, 504))

    def add_prompts(self, name: str, prompts: list[Any]) -> range:
        """Give prompts to a service that was started with ``--fed``; returns the numbers of their groups.

        Args:
            name: identifies these prompts: giving them again under it changes nothing.
            prompts: texts, lists of messages, or objects with ``prompt``, ``label`` and ``metadata``.

        Raises:
            ServiceError: a prompt is invalid (422), or the name stands for other prompts, or no more are taken (409).
        """
        fed = json.loads(self._send("POST", "/v1/prompts", {"id": name, "prompts": prompts})[1])
        return range(fed["first"], fed["first"] + fed["count"])

    def end_prompts(self) -> int:
        """Say that no more prompts come: :meth:`batches` ends after the last batch that they fill.

        Returns:
            The number of prompts that the service was given.
        """
        count: int = json.loads(self._send("POST", "/v1/prompts/end", {})[1])["prompts"]
        return count

    def state(self) -> dict[str, Any]:
        """Numbers of groups and workers."""
        state: dict[str, Any] = json.loads(self._send("GET", "/v1/state")[1])
        return state

    def _send(
        self,
        method: str,
        path: str,
        value: dict[str, Any] | None = None,
        *,
        seconds: float = 0.0,
        retried: tuple[int, ...] = _RETRIED,
    ) -> tuple[int, bytes]:
        """Send a request until it is answered; raises ServiceError."""
        headers = {"Content-Type": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        body = None if value is None else _body(value)
        first_failure, pause = None, _FIRST_PAUSE
        while True:
            try:
                status, answer = self._once(method, path, body, headers, seconds + _ANSWER_SECONDS)
                failure = f"status {status}: {_message(answer)}" if status in retried else ""
            except (OSError, http.client.HTTPException) as error:
                self.close()
                status, answer, failure = 0, b"", f"{type(error).__name__}: {error}"
            if not failure:
                break
            now = time.monotonic()
            first_failure = now if first_failure is None else first_failure
            if now - first_failure > self.patience:
                raise ServiceError(f"{self.url} did not answer for {self.patience:g} s: {failure}", status)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        if status == 409 and "/leases/" in path:
            raise LeaseLost(_message(answer), status)
        if status >= 400:
            raise ServiceError(_message(answer), status)
        return status, answer

    def _once(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str], seconds: float
    ) -> tuple[int, bytes]:
        try:
            connection = self._idle.pop()
        except IndexError:
            kind = http.client.HTTPSConnection if self._https else http.client.HTTPConnection
            connection = kind(self._address)
        connection.timeout = seconds
        if connection.sock is not None:
            connection.sock.settimeout(seconds)
        try:
            connection.request(method, self._base + path, body, headers)
            answer = connection.getresponse()
            status, received = answer.status, answer.read()
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
        return status, received


def _body(fields: dict[str, Any]) -> bytes:
    """Encode a request; an error names the field."""
    try:
        return _json(fields)
    except (TypeError, ValueError, RecursionError):
        for name, value in fields.items():
            try:
                _json(value)
            except (TypeError, ValueError, RecursionError) as error:
                text = f"{value!r:.120}".encode("ascii", "backslashreplace").decode()
                raise ServiceError(f"{name}: got {text}; expected plain data of JSON ({error})", 422) from error
        raise


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


def _message(answer: bytes) -> str:
    try:
        return str(json.loads(answer)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return answer[:200].decode("utf-8", "replace")


# -- the format: see wire.py ------------------------------------------------------------------------------------------


def _records(rest: memoryview) -> Iterator[tuple[dict[str, Any], memoryview]]:
    """Decode records one after another, each with the bytes of its columns."""
    while rest:
        size, head = struct.unpack_from("<II", rest)
        yield _fields(rest[8 : 8 + head]), rest[8 + head : 4 + size]
        rest = rest[4 + size :]


def _fields(data: memoryview) -> dict[str, Any]:
    fields: dict[str, Any] = _unpacked(data, 0)[0] if msgspec is None else msgspec.msgpack.decode(data)
    return fields


_NUMBERS = {
    0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q",
    0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q",
}  # fmt: skip
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_SIZES = {
    0xC4: ("bytes", ">B"), 0xC5: ("bytes", ">H"), 0xC6: ("bytes", ">I"),
    0xD9: ("str", ">B"), 0xDA: ("str", ">H"), 0xDB: ("str", ">I"),
    0xDC: ("list", ">H"), 0xDD: ("list", ">I"), 0xDE: ("dict", ">H"), 0xDF: ("dict", ">I"),
}  # fmt: skip
"""The types of MessagePack with a length, and how it is written."""


def _unpacked(data: memoryview, at: int) -> tuple[Any, int]:
    """Decode the MessagePack value at a position; return it with its end."""
    first = data[at]
    at += 1
    if first < 0x80:
        return first, at
    if first >= 0xE0:
        return first - 0x100, at
    if first >= 0xC0:
        if first in _CONSTANTS:
            return _CONSTANTS[first], at
        if first in _NUMBERS:
            form = _NUMBERS[first]
            return struct.unpack_from(form, data, at)[0], at + struct.calcsize(form)
        if first not in _SIZES:
            raise ValueError(f"byte {first:#x}: expected a type of MessagePack without extensions")
        kind, form = _SIZES[first]
        size, at = struct.unpack_from(form, data, at)[0], at + struct.calcsize(form)
    elif first >= 0xA0:
        kind, size = "str", first - 0xA0
    elif first >= 0x90:
        kind, size = "list", first - 0x90
    else:
        kind, size = "dict", first - 0x80
    if kind == "str":
        return str(data[at : at + size], "utf-8"), at + size
    if kind == "bytes":
        return bytes(data[at : at + size]), at + size
    values = []
    for _ in range(size if kind == "list" else 2 * size):
        value, at = _unpacked(data, at)
        values.append(value)
    return (values if kind == "list" else dict(zip(values[::2], values[1::2], strict=True))), at
