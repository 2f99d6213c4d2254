"""The names of the metrics of samples and of batches, each with its meaning: the tables of ``docs/metrics.md``.

Invariant: a name of this package's own counts is in a table; upper case stands for a part that varies. Environments add
names of theirs to those of samples. This module only names: the counts are made elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["OF_BATCHES", "OF_PROGRAMS", "OF_SAMPLES", "is_counted"]

OF_SAMPLES: Mapping[str, str] = {
    "attempts": "attempts of the rollout, this one included",
    "tool_calls": "tool calls in the replies",
    "tool_errors": "calls that were answered with an error, by environments whose tools are methods, and by adapters",
    "malformed_tool_calls": "calls that could not be read; the model got an error message",
    "malformed_tool_calls/FAULT": "the same, by fault",
    "unknown_tool_calls": "calls of a tool that the environment does not have",
    "duplicate_call_ids": "calls with the id of an earlier call of their reply",
    "truncated_messages": "messages or continuations of the environment that were cut",
    "images_not_shown": "images of a Python tool that were not shown to the model",
    "invalid_actions": "replies that the adapter of Gymnasium or OpenEnv could not read as an action",
    "replies_without_calls": "replies without a call that an ORS environment answered with its nudge",
    "blocks_not_shown": "content blocks of an ORS server that a model cannot read",
    "mcp_sessions_lost": "sessions with an MCP server that ended while they were needed",
    "mcp_blocks_not_shown": "content blocks of an MCP server that a model cannot read",
    "generation_seconds": "seconds that the model needed",
    "environment_seconds": "seconds in the environment's methods",
    "close_failures": "failures of the environment's ``close``, which do not fail the rollout",
    "snapshot_failures": "states of the environment that could not be stored",
    "continuations": "turns that continued after text of the environment",
    "continued_after_end": "continuations of a turn that the model had ended",
    "forks": "branches that begin where the template rewrote the history",
    "duplicated_tokens": "tokens of a branch that an earlier branch has too",
    "turns_before_resume": "turns that an earlier process of the run played",
    "restarted_at_resume": "1 if the episode started again after the run was resumed",
    "unfit_turns_at_resume": "turns of an earlier process that do not fit and were played again",
}
"""The metrics of a sample that agents in an environment have. A count of 0 is often absent."""

OF_PROGRAMS: Mapping[str, str] = {
    "program_seconds": "seconds that the program ran",
    "program_failed": "1 if its exit code was not 0",
    "calls": "model calls that were answered",
    "roots": "conversations that the program began",
    "sampled_tokens": "sampled ids of all calls, trained or not",
    "untrained_tokens/REASON": "sampled ids that no branch trains, by reason",
    "failed_calls": "calls that were not answered with a reply",
    "calls_by_hand": "calls of a function of the recipe, not of the program",
    "retries_joined": "repeated requests that joined the call in progress",
    "retries_served": "repeated requests that got the stored answer",
    "cut_off": "replies that calls still waited for when the session ended",
    "undelivered": "replies that no call waited for any more",
    "overflow": "calls whose context was full",
    "sampling_overridden/NAME": "requests for another value of a sampling parameter, which the run's replaced",
    "not_enforced/NAME": "requests with a field that was not honoured",
    "unknown_field/NAME": "requests with a field that the API does not have",
    "constrained_calls": "replies that a form of the request constrained",
    "assistant_last/EFFECT": "requests that end with an assistant message: a new turn, or its continuation",
    "server_tool/NAME": "requests for a tool that the provider of the API runs",
    "not_shown/NAME": "parts of messages that a model cannot read",
    "audio": "parts with audio, which were left out",
    "file": "parts with files, which were left out",
    "video": "parts with video, which were left out",
    "refused/CAUSE": "requests that were refused",
    "unknown_route/PATH": "requests for a route that the gateway does not have",
    "rewritten_at/PLACE": "requests whose history differs from what was sampled",
    "echo/CHANGE": "requests that repeat a reply in another form",
    "folded_system_messages": "system messages that were joined to the first one",
    "tools_changed": "requests with other tools than before",
    "bridge_refused": "continuations that the chat template cannot write after the sampled ids",
    "other_counts": "counts under further names, of which there were too many",
}
"""Further metrics of samples of agents that are programs. The last branch of a rollout has them."""

OF_BATCHES: Mapping[str, str] = {
    "batch": "number of the batch",
    "seconds": "wall time from the request for the batch to the batch",
    "ended": "the time of its end, in seconds since 1970",
    "reward/mean": "mean reward of a rollout",
    "reward/std": "standard deviation of the rewards of the rollouts",
    "tokens/mean": "mean tokens of a sample, prompt included",
    "response_length/mean": "mean tokens after the prompt of a sample",
    "response_length/max": "the most tokens after the prompt",
    "sampled_tokens/mean": "mean sampled tokens of a rollout in the batch",
    "sampled_tokens/OUTCOME": "the same of rollouts that were kept, dropped, failed, or of all, since the last batch",
    "sampled_tokens/sound": "mean sampled tokens of sound attempts since the last batch; once one was lost",
    "sampled_tokens/lost": "the same of lost attempts",
    "turns/mean": "mean replies of a rollout",
    "turns/sound": "mean replies of sound attempts since the last batch; once one was lost",
    "turns/lost": "the same of lost attempts",
    "policy_versions": "number of versions of the weights that sampled the batch",
    "status/STATUS": "share of rollouts with this status",
    "prefix_cache_hit_rate": "share of the prompt tokens that the server had in its cache",
    "repeated_prompts": "groups with the prompt (the metadata without text) and label of an earlier one; absent if 0",
    "forks": "sum of the metric ``forks`` of the samples",
    "duplicated_tokens": "sum of the metric ``duplicated_tokens`` of the samples",
    "duplicated_tokens/share": "the same as a share of all tokens",
    "resumed/continued": "rollouts that continued after a resume",
    "resumed/restarted": "rollouts that started again after a resume",
    "episode/NAME": "mean over the rollouts of the sample metric NAME; a rollout without it counts 0",
    "environment/NAME/share": "share of rollouts in the environment NAME",
    "environment/NAME/reward/mean": "mean reward there; so ``reward/std``, ``turns/mean``, ``response_length/mean``",
    "staleness/mean": "mean age of the trained tokens, in versions of the weights",
    "staleness/max": "the age of the oldest",
    "staleness/AGE": "share of the trained tokens of this age",
    "staleness/dropped": "share of groups that were too old; with a limit of staleness",
    "staleness/length": "mean length of rollouts in batches over that of all; with a limit of staleness",
    "idle/trainer_seconds": "seconds that the trainer waited for the batch; of a stream of batches",
    "idle/generator_seconds": "seconds in which no group was in flight; of a stream of batches",
    "lost/CAUSE": "attempts of rollouts that were lost, by cause, over the run",
    "lost/attempts": "all lost attempts, over the run",
    "lost/prompts": "prompts that lost an attempt, over the run",
    "lost/replaced": "lost rollouts that were replaced, over the run",
    "slots/running": "mean number of rollouts that ran",
    "slots/busy": "the same as a share of the slots",
    "groups/open": "mean number of groups in flight",
    "abandoned_threads": "threads of user code that overran their deadline and still run",
    "abandoned_coroutines": "coroutines that suppressed their cancellation",
    "prompts/STATE": "prompts in a state: taken, in_flight, ready, in_batch, dropped, failed, returned",
    "sampler/NAME": "numbers of the sampler of prompts",
}
"""The metrics of a batch: a line of ``metrics.jsonl``, ``manager.metrics``, and the argument of loggers."""


def is_counted(name: str) -> bool:
    """Whether this package counts a sample metric of this name."""
    return any(_fits(name, each) for each in (*OF_SAMPLES, *OF_PROGRAMS))


def _fits(name: str, pattern: str) -> bool:
    fixed, varies, _ = pattern.rpartition("/")
    return name == pattern or (pattern[len(fixed) + 1 :].isupper() and bool(varies) and name.startswith(f"{fixed}/"))
