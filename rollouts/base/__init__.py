"""Checks of values from users, printing, the packages of an extra, and packages that import their modules on use."""
