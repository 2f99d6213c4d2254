"""Serve a recipe's environment over the Open Reward Standard (ORS)."""
