"""The commands, by room: each parses, calls the Python API and prints. Importing a module registers its commands."""
