"""Tasks in Harbor's format: a wing that the core does not import.

schema.py       the tables of ``task.toml``, each field honoured or refused by name
ignore.py       the rules of ``.harborignore``
tasks.py        the loader of task folders
verdict.py      reward files, rungs of grading, lost verdicts
boxes.py        from the settings of a task to a kind of sandbox
grading.py      from the box of an agent to a verdict, on a rung
workspace.py    boxes filled and graded for programs of ours
check.py        oracle and no-op on each rung; the stored results
environment.py  an environment of Harbor's over our sandboxes
trial.py        Harbor's Trial as an agent function
recipe.py       the recipe of a folder of tasks
"""
