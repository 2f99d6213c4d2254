"""Write calculator problems as slime's prompts.

python training/slime/prepare_calculator.py train.jsonl 8000
"""

import sys
from itertools import islice
from pathlib import Path

import msgspec

from rollouts.environments.calculator import calculator_prompts


def write(path: Path, count: int, seed: int = 0) -> None:
    """One row for each problem: ``prompt``, ``label``, ``metadata``."""
    rows = [
        {"prompt": problem.prompt, "label": problem.label, "metadata": {"steps": len(problem.metadata["steps"])}}
        for problem in islice(calculator_prompts(seed), count)
    ]
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)
