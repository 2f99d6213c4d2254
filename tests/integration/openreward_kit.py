"""The original kit, unmodified: ``openreward_kit.py FOLDER CONFIG ROWS TOKENIZER HOST PORT`` prints its samples."""

import asyncio
import importlib
import json
import os
import sys
from argparse import Namespace
from typing import Any

folder, config, rows, tokenizer, host, port = sys.argv[1:]
sys.path.insert(0, folder)
os.environ["TRAIN_CONFIG"] = config


async def main() -> list[dict[str, Any]]:
    kit, scoring = importlib.import_module("generate"), importlib.import_module("reward")
    args = Namespace(
        hf_checkpoint=tokenizer,
        sglang_router_ip=host,
        sglang_router_port=int(port),
        rollout_max_response_len=512,
        rollout_temperature=1.0,
        rollout_top_p=1.0,
    )
    made = []
    for line in open(rows).read().splitlines():  # noqa: ASYNC230, SIM115 - nothing else runs here
        sample = await kit.generate(args, Namespace(**json.loads(line)), {})
        seen = {"tokens": sample.tokens.tolist(), "reward": sample.reward, "metadata": json.loads(sample.metadata)}
        made.append({**seen, "reward_func": await scoring.reward_func(args, sample)})
    return made


print(json.dumps(asyncio.run(main())), flush=True)
os._exit(0)
