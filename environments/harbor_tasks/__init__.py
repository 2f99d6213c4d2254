"""Sixteen tasks in Harbor's format: the ten repositories, and one for each special part of the format."""
