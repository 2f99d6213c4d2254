"""Public fakes: test environments, agents and recipes without a model or a server."""
