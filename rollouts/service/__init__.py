"""Leases over a run: a consumer takes whole groups, trains, and acknowledges them; each group is trained once."""

from rollouts.service.client import Batch, Rollouts, ServiceError
from rollouts.service.leased_run import leased_run
from rollouts.service.leases import Lease, LeaseLost, Leases

__all__ = ["Batch", "Lease", "LeaseLost", "Leases", "Rollouts", "ServiceError", "leased_run"]
