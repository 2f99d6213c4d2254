"""strands-sglang's view of the tokens of one conversation, under the names of all its versions.

Invariant: it is a read-only view of a :class:`~rollouts.trajectory.Trajectory`, which keeps the laws. Logprobs of
context tokens are 0: a trainer's column contains only numbers, and no loss reads these.
"""

from __future__ import annotations

import itertools

import attrs

from rollouts.trajectory import Trajectory

__all__ = ["Rollout", "Token", "TokenManager"]


@attrs.frozen
class Token:
    """One token."""

    token_id: int
    logprob: float | None = None
    loss_mask: bool = True


@attrs.define(eq=False, repr=False)
class Rollout:
    """Prompt, replies and tool results, in the order the model saw them."""

    trajectory: Trajectory = attrs.field(factory=Trajectory)

    def __len__(self) -> int:
        return len(self.trajectory)

    def __repr__(self) -> str:
        return f"<Rollout of {self.trajectory!r}>"

    @property
    def token_ids(self) -> list[int]:
        return [int(token) for token in self.trajectory.tokens]

    @property
    def loss_mask(self) -> list[int]:
        """1 where the policy sampled the token."""
        return [int(sampled) for sampled in self.trajectory.mask]

    @property
    def logprobs(self) -> list[float]:
        return [float(logprob) for logprob in self.trajectory.logprobs]

    @property
    def initial_prompt_length(self) -> int:
        """Tokens before the first sampled one."""
        calls = self.trajectory.completions
        return calls[0].start if calls else len(self)

    @property
    def segment_info(self) -> list[tuple[bool, int]]:
        """``(sampled, length in tokens)`` of each context and each reply, in order."""
        edges = [edge for call in self.trajectory.completions for edge in (call.start, call.stop)]
        bounds = [0, *edges, len(self)]
        lengths = [stop - start for start, stop in itertools.pairwise(bounds)]
        return [(bool(place % 2), length) for place, length in enumerate(lengths) if length]

    @property
    def tokens(self) -> list[Token]:
        columns = zip(self.token_ids, self.logprobs, self.loss_mask, strict=True)
        return [Token(token, logprob, bool(weight)) for token, logprob, weight in columns]

    @property
    def initial_prompt(self) -> list[Token]:
        return self.tokens[: self.initial_prompt_length]

    @property
    def segments(self) -> list[list[Token]]:
        tokens = iter(self.tokens)
        return [[next(tokens) for _ in range(length)] for _, length in self.segment_info]


TokenManager = Rollout
