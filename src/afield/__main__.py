from afield.cli.main import main

raise SystemExit(main())
