"""Routed experts, sets of top_p, counters and spans: joined over the requests of a sample, refused where incomplete."""

from __future__ import annotations

import base64
import struct
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from rollouts.dtypes import Endpoint, Extras, Limits, Message, Prompt, SamplingParams
from rollouts.engine import DEMO_MODEL
from rollouts.environments import CalculatorEnvironment, StepResult
from rollouts.errors import ConfigError
from rollouts.inference.resumable import ResumablePolicy
from rollouts.inference.sglang import SGLangPolicy
from rollouts.integrations.slime import generate_rollout_batch
from rollouts.integrations.slime.convert import leaves, to_slime
from rollouts.integrations.slime.extras import Replay
from rollouts.integrations.slime.pipeline import PROBE
from rollouts.renderer.tokenizer import Codec, load_tokenizer
from rollouts.testing.server import StubServer
from rollouts.training import Sample, agent_rollout_to_samples
from tests.integrations.slime.launches import Source
from tests.integrations.slime.test_pipeline import single_turn
from tests.integrations.slime.test_returned_samples import filled

Serve = Callable[..., StubServer]

SHAPE = (3, 2)
REPLAY = Replay(experts=SHAPE, top_p_sets=True, speculative=True)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>'
ENDED = "The answer is 3.<|im_end|>"
THOUGHT = "<think>\n1 + 2 is 3.\n</think>\n\nThe answer is 3.<|im_end|>"
FORGETS = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content and loop.last %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}
{{- m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A template that leaves the thoughts out of every reply but the last."""


class Model:
    """A server's script: request k routes position p to ``100 * p + k``, and keeps k ids for each token."""

    def __init__(self, serve: Serve, replies: Sequence[Any] = (ENDED,), *, lacks: str = "", knows_start: bool = True):
        self.codec = Codec(load_tokenizer(DEMO_MODEL))
        self.replies = replies
        self.lacks = lacks
        self.knows_start = knows_start
        self.stub = serve(reply=self)

    def __call__(self, input_ids: list[int], params: dict[str, Any]) -> Mapping[str, Any]:
        number = len(self.stub.requests)
        given = self.replies[min(number, len(self.replies)) - 1]
        text, finish = (given, "stop") if isinstance(given, str) else given
        ids = self.codec.encode(text).tolist()[: params["max_new_tokens"]]
        start = self.stub.requests[-1].body.get("routed_experts_start_len", 0) if self.knows_start else 0
        width = SHAPE[0] * SHAPE[1]
        rows = [100 * at + number for at in range(start, len(input_ids) + len(ids) - 1) for _ in range(width)]
        meta = {
            "finish_reason": {"type": finish},
            "prompt_tokens": len(input_ids),
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
            "routed_experts": base64.b64encode(struct.pack(f"<{len(rows)}i", *rows)).decode(),
            "routed_experts_start_len": start,
            "top_p_token_ids": [token for token in ids for _ in range(number)],
            "top_p_token_offsets": [number * count for count in range(len(ids) + 1)],
            "e2e_latency": 0.5 * number,
            "spec_accept_token_num": 3,
            "spec_draft_token_num": 4,
            "spec_verify_ct": 2,
        }
        return {"output_ids": ids, "meta_info": {name: meta[name] for name in meta if name != self.lacks}}

    async def play(self, environment: Any = CalculatorEnvironment, **options: Any) -> list[Sample]:
        """Samples of one rollout, as the rollout function plays them."""
        client = SGLangPolicy(Endpoint(base_url=self.stub.url))
        async with client:
            return await agent_rollout_to_samples(
                Prompt("1 + 2?", index=0),
                environment_cls=environment,
                endpoint=Endpoint(),
                tokenizer=str(DEMO_MODEL),
                sampling=SamplingParams(max_new_tokens=60, top_p=0.9),
                policy=ResumablePolicy(client, extras=REPLAY.request(), backoff_seconds=0.0),
                **options,
            )


def requests_of(rows: Any) -> list[int]:
    """The number of the request of each row, after a check of its position."""
    numbers = rows[:, 0, 0].numpy()
    assert (rows.numpy() == numbers[:, None, None]).all()
    assert (numbers // 100 == np.arange(len(numbers))).all()
    return (numbers % 100).tolist()


class Talker:
    """An environment that never ends."""

    tools = ()

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        return prompt.messages

    async def step(self, reply: Message) -> StepResult:
        return StepResult((Message("user", "again " * 20),))

    async def close(self) -> None:
        return None


# -- joined columns ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("knows_start", [True, False], ids=["asked for new rows", "server sends all rows"])
async def test_each_turn_keeps_the_rows_of_its_own_request(serve: Serve, knows_start: bool) -> None:
    """A later request computes older positions again, perhaps with other weights: its rows of them are not used."""
    model = Model(serve, [CALL, ENDED], knows_start=knows_start)
    (sample,) = await model.play()
    record = to_slime(sample, replay=REPLAY, scored=False)
    first, second = sample.completions
    assert record.rollout_routed_experts.shape == (len(record.tokens) - 1, *SHAPE)
    assert str(record.rollout_routed_experts.dtype) == "torch.int32"
    assert requests_of(record.rollout_routed_experts) == [1] * (first.stop - 1) + [2] * (second.stop - first.stop)
    starts = [request.body.get("routed_experts_start_len") for request in model.stub.requests]
    assert starts == [None, first.stop - 1]


async def test_a_resumed_reply_keeps_the_rows_and_sets_of_its_parts(serve: Serve) -> None:
    """The aborted part and its continuation are one completion; both requests are in the trace."""
    model = Model(serve, [("The answer", "abort"), (" is 3.<|im_end|>", "stop")])
    (sample,) = await model.play()
    record = to_slime(sample, replay=REPLAY, scored=False)
    (completion,) = sample.completions
    assert isinstance(completion.extras, Extras)
    part = len(model.codec.encode("The answer"))
    rows = requests_of(record.rollout_routed_experts)
    assert rows == [1] * (completion.start + part - 1) + [2] * (len(record.tokens) - completion.start - part)
    sizes = np.diff(record.rollout_top_p_token_offsets.numpy()).tolist()
    assert sizes == [1] * part + [2] * (record.response_length - part)
    ends = [event for event in record.trace["events"] if event["type"] == "span_end"]
    assert [event["attrs"]["e2e_latency"] for event in ends] == [0.5, 1.0]


async def test_each_branch_of_a_fork_has_its_own_rows(serve: Serve, tmp_path: Path) -> None:
    """The first request of a branch has all rows before its reply: those tokens are context there."""
    model = Model(serve, [THOUGHT])
    (tmp_path / "forgets.jinja").write_text(FORGETS)
    limits = Limits(max_turns=2)
    first, second = await model.play(Talker, limits=limits, history="fork", chat_template=tmp_path / "forgets.jinja")
    for number, sample in enumerate((first, second), 1):
        record = to_slime(sample, replay=REPLAY, scored=False)
        assert requests_of(record.rollout_routed_experts) == [number] * (len(record.tokens) - 1)
    assert [request.body.get("routed_experts_start_len") for request in model.stub.requests] == [None, None]


async def test_tokens_of_the_environment_have_empty_sets(serve: Serve) -> None:
    """The offsets repeat over them, as the trainer expects."""
    model = Model(serve, [CALL, ENDED])
    (sample,) = await model.play()
    record = to_slime(sample, replay=REPLAY, scored=False)
    offsets = record.rollout_top_p_token_offsets.numpy()
    assert (len(offsets), offsets[0], offsets[-1]) == (
        record.response_length + 1,
        0,
        len(record.rollout_top_p_token_ids),
    )
    between = record.response_length - sample.sampled_tokens
    first, second = (call.stop - call.start for call in sample.completions)
    assert np.diff(offsets).tolist() == [1] * first + [0] * between + [2] * second
    kept = record.rollout_top_p_token_ids.numpy()
    assert kept[first:].tolist() == [token for token in record.tokens[-second:] for _ in range(2)]


async def test_tokens_after_the_last_reply_are_cut_off_with_replayed_routing(serve: Serve) -> None:
    """No request contained them, so their routing is unknown; without replay they stay, as context."""
    model = Model(serve)
    (whole,) = await model.play(Talker)
    length = whole.completions[0].stop
    (sample,) = await Model(serve).play(Talker, limits=Limits(max_tokens=length + 20))
    assert len(sample) > sample.completions[-1].stop
    record = to_slime(sample, replay=REPLAY, scored=False)
    assert len(record.tokens) == sample.completions[-1].stop == len(record.rollout_routed_experts) + 1
    widths = {len(record.loss_mask), len(record.rollout_log_probs), record.response_length}
    assert widths == {record.rollout_top_p_token_offsets.numel() - 1}
    assert len(to_slime(sample, scored=False).tokens) == len(sample)


async def test_counters_are_summed_over_requests(serve: Serve) -> None:
    """Those of speculative decoding, over all turns; without speculative decoding they stay 0, as in slime."""
    model = Model(serve, [CALL, ENDED])
    (sample,) = await model.play()
    info = to_slime(sample, replay=REPLAY, scored=False).spec_info
    assert (info.spec_accept_token_num, info.spec_draft_token_num, info.spec_verify_ct) == (6, 8, 4)
    assert info.completion_token_num == sample.sampled_tokens
    assert to_slime(sample, scored=False).spec_info.completion_token_num == 0


async def test_extras_are_not_stored(serve: Serve) -> None:
    """A run's folder has what it had before; a compact sample still returns them, and a copy has them, too."""
    (sample,) = await Model(serve).play()
    assert sample.compact is not None
    assert "extras" not in sample.to_dict()["completions"][0]
    assert Sample.from_dict(sample.to_dict()).completions[0].extras is None
    assert sample.completions[0].extras is sample.completions[0].extras is not None


@pytest.mark.parametrize("field", ["routed experts", "top_p sets"])
async def test_a_column_with_a_gap_is_refused(serve: Serve, field: str) -> None:
    """The sample is lost, and never trained with rows of other positions."""
    (sample,) = await Model(serve).play()
    stored = Sample.from_dict(sample.to_dict())
    extras = sample.completions[0].extras
    assert extras is not None
    assert extras.experts is not None
    cut = {"routed experts": {"experts": extras.experts[1:], "experts_start": 1}}
    broken = attrs.evolve(extras, **cut.get(field, {"top_p_ids": None, "top_p_counts": None}))
    stored.completions = [attrs.evolve(stored.completions[0], extras=broken)]
    with pytest.raises(ConfigError, match=field):
        to_slime(stored, replay=REPLAY, scored=False)


# -- through the rollout function -------------------------------------------------------------------------------------


FLAGS = {"use_rollout_routing_replay": True, "num_layers": 3, "moe_router_topk": 2, "rollout_top_p": 0.9}


def launch(model: Model, **overrides: Any) -> Namespace:
    return single_turn(model.stub, **{**FLAGS, **overrides})


def test_a_batch_has_the_columns_that_the_trainer_replays(serve: Serve) -> None:
    """One request tests the server first; evaluation asks for no sets of top_p, as in slime."""
    model = Model(serve)
    samples = list(leaves(generate_rollout_batch(launch(model), 0, Source(2)).samples))
    probe, *others = model.stub.requests
    assert (tuple(probe.input_ids), probe.sampling_params["max_new_tokens"]) == (PROBE, 1)
    assert len(others) == len(samples) == 4
    for sample in samples:
        assert len(sample.rollout_routed_experts) == len(sample.tokens) - 1
        assert len(sample.rollout_top_p_token_offsets) == sample.response_length + 1


@pytest.mark.parametrize(
    ("lacks", "flag"),
    [("routed_experts", "use_rollout_routing_replay"), ("top_p_token_ids", "rollout_top_p")],
)
def test_a_server_that_drops_a_column_is_refused_at_the_start(serve: Serve, lacks: str, flag: str) -> None:
    """By the names of the flag and of the field, after one request."""
    model = Model(serve, lacks=lacks)
    with pytest.raises(ConfigError, match=rf"args\.{flag}.*meta_info\.{lacks}"):
        generate_rollout_batch(launch(model), 0, Source(2))
    assert len(model.stub.requests) == 1


@pytest.mark.parametrize("size", ["num_layers", "moe_router_topk"])
def test_routing_replay_needs_the_sizes_of_the_model(serve: Serve, size: str) -> None:
    """They are the shape of each row."""
    model = Model(serve)
    with pytest.raises(ConfigError, match=rf"args\.{size}"):
        generate_rollout_batch(launch(model, **{size: None}), 0, Source(2))


async def without_columns(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    return filled(sample, reward=1.0)


def test_a_custom_function_must_set_the_columns(serve: Serve) -> None:
    """The trainer would fail on its samples later, without a name."""
    args = launch(Model(serve), custom_generate_function_path=f"{__name__}.without_columns")
    with pytest.raises(ConfigError, match=r"rollout_routed_experts: got None; expected .*use_rollout_routing_replay"):
        generate_rollout_batch(args, 0, Source(2))
