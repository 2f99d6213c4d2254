"""Search: answer questions from a local collection of documents, in several turns."""

from rollouts.recipes.environments.search.index import Document, Index, load_documents
from rollouts.recipes.environments.search.task import SearchEnvironment, load_questions, search_reward
from rollouts.recipes.environments.search.world import made_up_world

__all__ = [
    "Document",
    "Index",
    "SearchEnvironment",
    "load_documents",
    "load_questions",
    "made_up_world",
    "search_reward",
]
