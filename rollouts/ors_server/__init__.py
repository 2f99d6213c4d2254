"""A recipe's environment served over the Open Reward Standard."""
