"""The one exception that means "the user can fix this": commands print it as one line and exit with 2."""


class UserError(Exception):
    """A message for a person: names the option, key or file, and says what to do."""
