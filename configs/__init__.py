"""The built-in recipes, run by name (``rollouts run calculator``): one function a file, to read and to copy."""
