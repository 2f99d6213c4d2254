"""What a run shows in a terminal."""
