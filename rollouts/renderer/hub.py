"""Whether the hub has a model that is not in the local cache: transformers asks for each file, again and again.

Invariant: only a hub that cannot be reached, or that says that it has no such model, refuses a name. Any other answer,
as of a mirror that serves files only or of a limit of requests, leaves the decision to transformers.
"""

from __future__ import annotations

import importlib
from typing import Any

from rollouts.errors import ConfigError

__all__ = ["check_hub"]

_HUB_SECONDS = 10.0
_CACHED = ("config.json", "tokenizer_config.json", "tokenizer.json")
"""Files of a tokenizer; one of them in the cache says that it was loaded before."""


def check_hub(name: str, expected: str, *, endpoint: str | None = None) -> None:
    """Ask the hub once for a model that is not in the local cache.

    Args:
        name: of the model.
        expected: in place of the name, for the message.
        endpoint: URL of the hub; ``None`` for its own.

    Raises:
        ConfigError: the hub does not answer, or does not have it.
    """
    hub: Any = importlib.import_module("huggingface_hub")  # transformers brings it
    errors: Any = importlib.import_module("huggingface_hub.errors")
    try:
        if hub.is_offline_mode() or any(isinstance(hub.try_to_load_from_cache(name, file), str) for file in _CACHED):
            return
        hub.HfApi(endpoint=endpoint).model_info(name, timeout=_HUB_SECONDS)
    except Exception as error:  # of its HTTP client, which changes with its version
        if isinstance(error, errors.HfHubHTTPError) and not isinstance(error, errors.RepositoryNotFoundError):
            return
        why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
        raise ConfigError(
            f"tokenizer: got {name!r}, which is not a folder here, and the hub does not give it ({why}); "
            f"expected {expected}"
        ) from error
