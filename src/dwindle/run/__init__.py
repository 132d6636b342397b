"""Where the rooms meet: plans, runs and the functions behind the commands."""
