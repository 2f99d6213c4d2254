"""Agents on a chat API: a wing that plays environments with any model behind OpenAI's chat completions.

Samples of it have messages and no token ids, so that they can be evaluated and curated as text, and no trainer takes
them. ``endpoint.py`` has the API and its prices, ``account.py`` the budget, ``wire.py`` requests and replies,
``client.py`` the retries, ``episode.py`` the loop, ``generate.py`` the generate function, ``recipe.py`` recipes on it.
"""

from rollouts.chat_api.account import Account, BudgetSpent
from rollouts.chat_api.endpoint import ChatEndpoint, Prices
from rollouts.chat_api.generate import chat_rollout_to_samples, generate_chat_batch
from rollouts.chat_api.recipe import chat_recipe

__all__ = [
    "Account",
    "BudgetSpent",
    "ChatEndpoint",
    "Prices",
    "chat_recipe",
    "chat_rollout_to_samples",
    "generate_chat_batch",
]
