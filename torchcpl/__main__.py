"""``python -m torchcpl``: the command line."""

from torchcpl.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
