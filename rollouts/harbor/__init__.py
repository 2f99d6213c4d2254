"""Tasks in Harbor's format: a wing that the core does not import.

schema.py  the tables of ``task.toml``, each field honoured or refused by name
ignore.py  the rules of ``.harborignore``
tasks.py   the loader of task folders
"""
