"""The command ``dwindle`` and ``python -m dwindle``, which is also what torchrun starts."""

import sys


def main() -> None:
    """Run one command; Ctrl-C ends it without a traceback while its modules are imported, too."""
    try:
        from dwindle.commands.main import main as run
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
