"""The flags of an SGLang server that change what a run may ask of it, from the server's description.

Invariant: a request that the server would refuse because of its flags is refused before the first rollout; what a flag
changes otherwise is logged. This module sends nothing.
"""

from __future__ import annotations

import logging
import re

from rollouts.dtypes import CONSTRAINTS, SamplingParams
from rollouts.errors import ConfigError
from rollouts.inference.base import ServerInfo

__all__ = ["OLDEST_SGLANG", "check_flags"]

OLDEST_SGLANG = (0, 5, 22)
"""Earlier versions do not report which tokens are of which weights, or that an update did not flush the cache."""

_NO_GRAMMARS = (
    "none: the server has no grammar backend (--grammar-backend none, or the embedded engine), or reports logprobs"
    " before it (vLLM's --logprobs-mode raw_logprobs)"
)
_NO_TAGS = "none: the server's grammar backend has no structural tags (--grammar-backend xgrammar or llguidance has)"

_LOG = logging.getLogger(__name__)


def check_flags(server: ServerInfo, sampling: SamplingParams) -> None:
    """Check sampling parameters against the flags of a server, and log what else follows from these.

    Raises:
        ConfigError: the server has no tokenizer, which a parameter needs.
    """
    if server.has_tokenizer is False:
        _check_without_tokenizer(sampling)
    if server.has_grammars is False and sampling.constrained:
        given = next(name for name in CONSTRAINTS if getattr(sampling, name) is not None)
        raise ConfigError.of(f"SamplingParams.{given}", getattr(sampling, given), _NO_GRAMMARS)
    if server.has_structural_tags is False and sampling.structural_tag is not None:
        raise ConfigError.of("SamplingParams.structural_tag", sampling.structural_tag, _NO_TAGS)
    if server.http_workers is not None and server.http_workers > 1:
        _LOG.warning(
            "the server has --tokenizer-worker-num %d: weight updates retract running requests in every mode but in"
            " place, and a request that a router sends twice is not noticed",
            server.http_workers,
        )
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", server.version or "")
    if found is not None and tuple(map(int, found.groups())) < OLDEST_SGLANG:
        _LOG.warning(
            "the server is SGLang %s; expected at least %s: earlier versions do not report which tokens are of which"
            " weights, or that an update did not flush the cache",
            server.version,
            ".".join(map(str, OLDEST_SGLANG)),
        )


def _check_without_tokenizer(sampling: SamplingParams) -> None:
    """SGLang refuses these with ``--skip-tokenizer-init`` (SGLang 0.5.23, sampling/sampling_params.py)."""
    expected = "none: the server has --skip-tokenizer-init. Start it without"
    if sampling.stop:
        raise ConfigError.of("SamplingParams.stop", sampling.stop, expected)
    if sampling.min_new_tokens:
        raise ConfigError.of("SamplingParams.min_new_tokens", sampling.min_new_tokens, expected)
