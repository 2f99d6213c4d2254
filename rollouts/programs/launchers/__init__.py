"""Agents that are programs: how each is started for one task, with our model server as its only one."""
