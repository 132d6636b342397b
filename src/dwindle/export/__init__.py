"""Writing models for other tools to load; every writer verifies what it wrote."""
