"""The one exception that means "the user can fix this": commands print it as one line and exit with 2."""


class UserError(Exception):
    """A message for a person: names the option, key or file, and says what to do."""


def install_hint(extra: str) -> str:
    """How to get optional packages; dwindle itself is installed from its checkout."""
    return f"run `pip install -c constraints.txt -e '.[{extra}]'` in dwindle's checkout"
