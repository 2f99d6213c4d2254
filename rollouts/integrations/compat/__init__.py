"""APIs of other systems as thin wrappers: user code runs after a change of its import lines."""
