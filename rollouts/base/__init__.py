"""Checks of values that users give, printing, the packages of an extra, packages that import their modules on use."""
