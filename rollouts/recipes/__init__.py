"""Built-in recipes, run by name (``rollouts run calculator``), and in :mod:`rollouts.recipes.environments` their tasks.

Invariant: they use the package as a user's recipe does, and no other module of the package imports them.
"""
