"""The one exception that means "the user can fix this": commands print it as one line and exit with 2."""


class UserError(Exception):
    """A message for a person: names the option, key or file, and says what to do."""


def first_line(error: BaseException) -> str:
    """A library's message, short enough to quote in ours."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".:") if lines else type(error).__name__


def install_hint(extra: str) -> str:
    """The command that installs an optional group of packages; dwindle itself is installed from its checkout."""
    return f"run `pip install -c constraints.txt -e '.[{extra}]'` in dwindle's checkout"
