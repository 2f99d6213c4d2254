"""The names of the systems that users come from, each a thin face over ours: change the import line, keep the code."""
