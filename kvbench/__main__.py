"""`python -m kvbench`: the command line without the installed script."""

from .cli.main import main

if __name__ == "__main__":
    main()
