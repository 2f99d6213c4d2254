"""Ten small Python repositories, each with a defect and the tests that show it."""
