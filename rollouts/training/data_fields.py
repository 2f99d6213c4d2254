"""The fields of a new sample that belong to the data: label, index and group index.

Invariant: a sample of a generate function has those of its request, or none yet; a lost one gets them, and keeps its
own failure. Where the data have no label, the function may set one, and it may play another prompt. A sample with a
trainer's record is excepted for the label: such a record may have another than its group, and the trainer's functions
may change it.
"""

from __future__ import annotations

from rollouts.base.storable import to_json
from rollouts.dtypes import Prompt, as_messages
from rollouts.errors import ConfigError, GenerateFailure, shortened
from rollouts.training.sample import Sample
from rollouts.training.sample_validator import copied
from rollouts.training.status import Status

__all__ = ["check_data"]


def check_data(sample: Sample, request: Prompt, source: str) -> None:
    """Compare the fields that are set with the request's; afterwards a prompt that equals the request's is the same.

    Raises:
        GenerateFailure: a field differs, or cannot be compared.
    """
    try:
        new = f"a new Sample for rollout {request.index}"
        if sample.index not in (None, request.index):
            raise ConfigError.of("Sample.index", sample.index, new)
        if sample.group_index not in (None, request.group_index):
            raise ConfigError.of("Sample.group_index", sample.group_index, f"{new} of group {request.group_index}")
        if sample.trainer_record is not None:
            return
        if sample.status in (Status.FAILED, Status.ABORTED):
            sample.label = copied(request.label)
        elif not (sample.label is None or request.label is None) and to_json(sample.label) != to_json(request.label):
            raise ConfigError.of("Sample.label", sample.label, f"{shortened(request.label)}, as in the data")
        elif sample.prompt and as_messages(sample.prompt) == request.messages:
            sample.prompt = request.prompt  # of frozen messages, which cannot be edited in place
    except Exception as error:
        text = str(error) if isinstance(error, ConfigError) else f"a value of the sample raises {shortened(error)}"
        raise GenerateFailure(f"{source}: {text}") from error
