"""Entry point of `python -m afield`."""

from afield.cli.main import main

raise SystemExit(main())
