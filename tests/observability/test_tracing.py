"""Spans, as the real SDK exports them."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from rollouts.dtypes import Endpoint, SamplingParams
from rollouts.engine import DEMO_MODEL
from rollouts.environments import SingleTurnEnvironment
from rollouts.inference.shared import shared_policies, shared_policy
from rollouts.observability.tracing import trace_completions, traced
from rollouts.renderer import renderer_for
from rollouts.testing.server import StubServer
from rollouts.training import AsyncRolloutManager, DataBuffer, RolloutConfig, generate_rollout_batch

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="opentelemetry-sdk is not installed")


pytestmark = pytest.mark.extra


@pytest.fixture(scope="module")
def exported() -> Any:
    """The exporter of all later spans of this process."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


async def test_a_completion_is_a_child_of_its_rollout(exported: Any) -> None:
    """Spans contain the model, token counts and finish reason, and no text."""
    async with StubServer() as server:
        endpoint = Endpoint(model=str(DEMO_MODEL), base_url=server.url, sampling=SamplingParams(max_new_tokens=8))
        generate_fn = functools.partial(
            generate_rollout_batch,
            environment_cls=SingleTurnEnvironment,
            endpoint=endpoint,
            tokenizer=endpoint.model,
        )
        config = RolloutConfig(
            batch_size=2,
            n_samples_per_prompt=1,
            over_sampling_factor=1.0,
            generate_fn=generate_fn,
            reward_fn=lambda sample: 1.0,
        )
        trace_completions(shared_policy(endpoint, renderer_for(endpoint.model).vocab_size))
        async with AsyncRolloutManager(traced(config, "quiz"), DataBuffer(["a secret"])) as manager:
            samples = await manager.generate_batch()
        assert len(shared_policies()) == 1
    spans = exported.get_finished_spans()
    agents = {span.context.span_id: span for span in spans if span.name == "invoke_agent quiz"}
    calls = [span for span in spans if span.name.startswith("text_completion ")]
    assert (len(agents), len(calls)) == (2, 2)
    assert {span.parent.span_id for span in calls} == agents.keys()
    attributes = calls[0].attributes
    assert attributes["gen_ai.usage.output_tokens"] == 3
    assert attributes["gen_ai.usage.input_tokens"] == samples[0].completions[0].start
    assert attributes["gen_ai.response.id"] in {sample.completions[0].request_id for sample in samples}
    assert all(span.start_time <= span.end_time for span in spans)
    assert "secret" not in str([dict(span.attributes) for span in spans])
