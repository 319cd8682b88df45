"""`python -m counterpoint`: the same as the command `counterpoint`."""

from counterpoint.cli import main

if __name__ == "__main__":
    main()
