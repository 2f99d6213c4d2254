"""Problems with images and an answer to verify, as Geometry3K is published."""

from rollouts.recipes.environments.geo3k.task import Geo3kEnvironment, load_geo3k

__all__ = ["Geo3kEnvironment", "load_geo3k"]
