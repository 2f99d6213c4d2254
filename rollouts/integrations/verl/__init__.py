"""verl 0.9: our agent as its AgentLoop, our manager as its agent loop manager, samples as its rows.

Importing this package imports neither verl nor torch.
"""

from rollouts.integrations.verl.agent_loop import RolloutsLoop, ServerManagerPolicy
from rollouts.integrations.verl.manager import RolloutsManager
from rollouts.integrations.verl.rows import (
    put_group,
    register_advantages,
    teacher_columns,
    to_data_proto,
    to_outputs,
    worker,
)

__all__ = [
    "RolloutsLoop",
    "RolloutsManager",
    "ServerManagerPolicy",
    "put_group",
    "register_advantages",
    "teacher_columns",
    "to_data_proto",
    "to_outputs",
    "worker",
]
