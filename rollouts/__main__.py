"""``python -m rollouts`` is the command ``rollouts``."""

import sys

from rollouts.cli import main

sys.exit(main())
