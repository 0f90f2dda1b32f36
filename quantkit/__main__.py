"""`python -m quantkit` is the command `quantkit`, and as little as that does it import files of the current folder."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # which `-m` has put there
    from quantkit.cli import main

    main()
