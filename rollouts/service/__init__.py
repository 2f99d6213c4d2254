"""Leases over a run: a consumer takes whole groups, trains, and acknowledges them; each group is trained once."""

from rollouts.service.leased_run import leased_run
from rollouts.service.leases import Lease, LeaseLost, Leases

__all__ = ["Lease", "LeaseLost", "Leases", "leased_run"]
