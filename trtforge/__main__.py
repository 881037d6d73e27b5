"""`python -m trtforge` is the `trtforge` command."""

from trtforge.cli.app import main

if __name__ == "__main__":
    main()
