"""Environments with the tools of MCP servers."""

from rollouts.environments.mcp.environment import McpEnvironment
from rollouts.environments.mcp.server import McpServer

__all__ = ["McpEnvironment", "McpServer"]
