"""Entry point of ``python -m rollouts``, the same as the command ``rollouts``."""

import sys

from rollouts.commands import main

sys.exit(main())
