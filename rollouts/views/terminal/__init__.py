"""Terminal output of runs and samples."""
