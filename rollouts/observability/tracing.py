"""OpenTelemetry spans for rollouts and completions, named by its GenAI conventions (extra: ``otel``).

Invariant: one span for each rollout and one child span for each successful completion; no work for each token, and no
text of prompts or replies. The calling process configures the exporter: this module uses the API only.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

import attrs

from rollouts.base.extras import imported
from rollouts.dtypes import Completion, Prompt
from rollouts.inference.policy import ServerPolicy
from rollouts.training.config import RolloutConfig
from rollouts.training.types import GenerateFn, Sample

__all__ = ["trace_api", "trace_completions", "traced"]


def trace_api() -> Any:
    """The module ``opentelemetry.trace``, imported; raises as :func:`~rollouts.base.extras.imported`."""
    return imported("opentelemetry.trace", "opentelemetry-api", "otel")


def traced(config: RolloutConfig, name: str = "rollout") -> RolloutConfig:
    """Return the config with each rollout traced as a span ``invoke_agent NAME``.

    Raises:
        ConfigError: opentelemetry-api is not installed.
    """
    tracer = trace_api().get_tracer("rollouts")
    return attrs.evolve(config, generate_fn=functools.partial(_generate_traced, tracer, name, config.generate_fn))


async def _generate_traced(
    tracer: Any, name: str, generate_fn: GenerateFn, prompts: Sequence[Prompt]
) -> Sequence[Sample]:
    first = prompts[0] if prompts else None
    candidates = {"rollouts.group_index": first and first.group_index, "rollouts.index": first and first.index}
    present = {key: value for key, value in candidates.items() if value is not None}
    attributes = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": name, **present}
    with tracer.start_as_current_span(f"invoke_agent {name}", attributes=attributes) as span:
        samples = await generate_fn(prompts)
        for sample in samples:
            if isinstance(sample, Sample) and sample.failure is not None:
                span.set_attribute("error.type", sample.failure.kind)
                span.set_status(trace_api().StatusCode.ERROR, sample.failure.message)
        return samples


def trace_completions(policy: ServerPolicy) -> None:
    """Trace each completion of a policy as a span ``text_completion MODEL``, a child of the calling rollout's span.

    Raises:
        ConfigError: opentelemetry-api is not installed.
    """
    trace = trace_api()
    tracer = trace.get_tracer("rollouts")
    model = policy.endpoint.model

    def record_span(completion: Completion, server: str) -> None:
        now = time.time_ns()
        span = tracer.start_span(
            f"text_completion {model}",
            kind=trace.SpanKind.CLIENT,
            start_time=now - int(completion.seconds * 1e9),
            attributes={
                "gen_ai.operation.name": "text_completion",
                "gen_ai.provider.name": policy.endpoint.provider,
                "gen_ai.request.model": model,
                "gen_ai.response.id": completion.request_id,
                "gen_ai.response.finish_reasons": [completion.finish_reason],
                "gen_ai.usage.input_tokens": completion.prompt_tokens,
                "gen_ai.usage.output_tokens": len(completion.tokens),
                "gen_ai.usage.cache_read.input_tokens": completion.cached_tokens,
                "server.address": server,
            },
        )
        span.end(end_time=now)

    policy.on_completion(record_span)
