"""``python -m onecopy``: the ``onecopy`` command, where it is not on the path."""

from onecopy.cli import main

if __name__ == "__main__":
    main()
