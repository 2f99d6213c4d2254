"""The body of a delivered lease: whole groups in the journal's columns, without pickle.

    message = lease record · image records · tools records · sample records

Invariant: the samples that :func:`read_lease` returns equal those of the lease: columns bit for bit, fields as plain
data, as after a resume. An image and a list of tools are in a message once. ``client.py`` reads the same message
without this package.
"""

from __future__ import annotations

from typing import Any

import attrs

from rollouts.dtypes import Image
from rollouts.errors import RolloutsError
from rollouts.runs.record_bytes import Columns, framed, read_framed, sample_of
from rollouts.service.leases import Lease

__all__ = ["MEDIA_TYPE", "lease_bytes", "read_lease"]

MEDIA_TYPE = "application/vnd.rollouts.lease"


def lease_bytes(lease: Lease) -> bytes:
    """Encode a lease and its samples."""
    images: dict[str, Image] = {}
    tools: dict[str, int] = {}
    records = []
    for sample in lease.samples:
        fields = sample.fields_to_dict()
        if sample.tools is not None:
            fields["tools"] = tools.setdefault(sample.tools, len(tools))
        images.update(sample.named_images)
        records.append(framed({"kind": "sample", "sample": fields}, Columns.of(sample)))
    head = [framed({"kind": "lease", **_head(lease), "samples": len(records)}, None)]
    head += [framed({"kind": "image", "sha256": name, "data": image.data}, None) for name, image in images.items()]
    head += [framed({"kind": "tools", "number": number, "tools": text}, None) for text, number in tools.items()]
    return b"".join([*head, *records])


def read_lease(body: bytes) -> Lease:
    """Decode the output of :func:`lease_bytes`.

    Raises:
        RolloutsError: the body is incomplete.
    """
    images: dict[str, Image] = {}
    tools: dict[int, str] = {}
    lease: Lease | None = None
    expected, samples = 0, []
    for fields, columns in read_framed(body):
        match fields["kind"]:
            case "lease":
                lease = Lease(fields["token"], tuple(fields["groups"]), (), fields["consumer"])
                expected = fields["samples"]
            case "image":
                images[fields["sha256"]] = Image(fields["data"])
            case "tools":
                tools[fields["number"]] = fields["tools"]
            case "sample" if columns is not None:
                values = fields["sample"]
                if values["tools"] is not None:
                    values["tools"] = tools[values["tools"]]
                samples.append(sample_of(values, columns, images.__getitem__))
    if lease is None or len(samples) != expected:
        raise RolloutsError(f"a lease has {len(samples)} of {expected} samples")
    return attrs.evolve(lease, samples=tuple(samples))


def _head(lease: Lease) -> dict[str, Any]:
    return {"token": lease.token, "groups": lease.groups, "consumer": lease.consumer}
