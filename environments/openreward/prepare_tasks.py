"""Fetch the tasks of all environments and write them as rows for slime and for ``rollouts run``.

python -m rollouts.recipes.environments.openreward.prepare_tasks --config train_config.yaml --output tasks.jsonl
"""

import argparse
import functools
import sys
from pathlib import Path

import anyio

from rollouts.base.terminal import say
from rollouts.errors import RolloutsError
from rollouts.recipes.environments.openreward.config import load_settings
from rollouts.recipes.environments.openreward.tasks import prepare_tasks, write_tasks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=Path("train_config.yaml"), help="(%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("tasks.jsonl"), help="(%(default)s)")
    parser.add_argument("--max-tasks", type=int, help="of each split of an environment without num_samples")
    parser.add_argument("--seed", type=int, default=42, help="(%(default)s)")
    args = parser.parse_args()
    try:
        settings = load_settings(args.config)
        fetch = functools.partial(prepare_tasks, settings, max_tasks=args.max_tasks, seed=args.seed)
        rows = anyio.run(fetch)
    except RolloutsError as error:
        say(f"prepare_tasks: error: {error}", file=sys.stderr)
        return 2
    write_tasks(rows, args.output)
    say(f"{len(rows)} tasks: {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
