"""The commands, one file each: they parse, call the Python API and print. Importing a module registers its command."""
