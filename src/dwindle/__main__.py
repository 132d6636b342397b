"""``python -m dwindle``, which is also what torchrun starts."""

from dwindle.commands.main import main

if __name__ == "__main__":
    main()
