"""Search-R1: questions answered in one assistant turn, with search results between tags."""

from rollouts.recipes.environments.search_r1.retrieval import RetrievalServer, Retrieve
from rollouts.recipes.environments.search_r1.task import (
    STOP,
    SearchR1Environment,
    instructed,
    load_search_r1,
    search_r1_reward,
)

__all__ = [
    "STOP",
    "RetrievalServer",
    "Retrieve",
    "SearchR1Environment",
    "instructed",
    "load_search_r1",
    "search_r1_reward",
]
