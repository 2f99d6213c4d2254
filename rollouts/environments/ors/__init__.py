"""Environments on servers of the Open Reward Standard (ORS); the ``openreward`` package is not needed.

server = ORSServer("http://127.0.0.1:8080")
prompts = await server.prompts("train")
environment_cls = functools.partial(ORSEnvironment, server)
"""

from rollouts.environments.ors.client import ORSServer, ORSTask, spec_digest
from rollouts.environments.ors.environment import CallRecord, ORSEnvironment
from rollouts.environments.ors.scoring import GroupScore

__all__ = ["CallRecord", "GroupScore", "ORSEnvironment", "ORSServer", "ORSTask", "spec_digest"]
