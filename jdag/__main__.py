"""The command line: `python -m jdag` does what `jdag` does."""

from jdag.cli import main

if __name__ == "__main__":
    main()
