"""``python -m rollouts`` is the command ``rollouts``."""

import sys

from rollouts.commands import main

sys.exit(main())
