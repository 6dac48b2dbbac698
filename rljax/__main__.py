"""`python -m rljax`."""

import sys

from rljax.cli import main

sys.exit(main())
