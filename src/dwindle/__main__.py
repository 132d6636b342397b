"""``python -m dwindle``, which is also what torchrun starts."""

from dwindle.cli import main

if __name__ == "__main__":
    main()
