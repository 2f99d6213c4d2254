"""Model API server for agents that are programs: three wire formats in, exact token ids kept."""
