"""Entry point of the command ``rollouts`` and of ``python -m rollouts``."""

import sys

from rollouts.concurrency.interrupts import exit_on_interrupt

__all__ = ["main"]


def main() -> int:
    """Run the command line of this process; returns the exit code."""
    exit_on_interrupt()
    from rollouts.commands import main as run_command  # imports for seconds, in which Ctrl-C works already

    return run_command()


if __name__ == "__main__":
    sys.exit(main())
