"""Views of runs and samples: on the terminal, and as an HTML page."""
