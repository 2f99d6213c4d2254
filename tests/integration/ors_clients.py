"""Real clients against our ORS server: ``python ors_clients.py openreward|ors URL NAME`` prints their results."""

import asyncio
import json
import os
import sys
from typing import Any

kind, url, name = sys.argv[1:4]
os.environ["OPENREWARD_DISABLE_UPDATE_CHECK"] = "1"
os.environ["OPENREWARD_SESSION_URL"] = os.environ["OPENREWARD_API_URL"] = url


async def calls(session: Any, *asked: tuple[str, dict[str, Any]]) -> list[Any]:
    seen: list[Any] = []
    for tool, given in asked:
        try:
            out = await session.call_tool(tool, given)
            seen.append([[block.text for block in out.blocks], out.reward, out.finished])
        except Exception as error:  # noqa: BLE001 - whatever a client makes of a failure is what is looked at
            seen.append([type(error).__name__, str(error)])
    return seen


async def main() -> dict[str, Any]:
    if kind == "openreward":
        from openreward import AsyncOpenReward

        client: Any = AsyncOpenReward()
        environment = client.environments.get(name)  # bare paths, as its users write them
        named = client.environments.get(name, variant=name)
    else:
        from ors.client import AsyncORS

        client = AsyncORS(base_url=url)
        environment = named = client.environment(name)
    seen: dict[str, Any] = {"splits": await environment.list_splits(), "count": await named.num_tasks("train")}
    tasks = await environment.list_tasks("train")
    seen["tasks"] = [task.task_spec for task in tasks]
    seen["range"] = [task.task_spec for task in await environment.get_task_range("train", -2)]
    seen["task"] = (await environment.get_task("train", 1)).task_spec
    seen["tools"] = [tool.name for tool in await environment.list_tools()]
    try:
        await environment.list_tasks("dev")
    except Exception as error:  # noqa: BLE001
        seen["wrong split"] = str(error)
    async with environment.session(task=tasks[0]) as session:
        seen["prompt"] = "".join(block.text for block in await session.get_prompt())
        seen["task tools"] = [tool.name for tool in await session.list_tools()]
        seen["calls"] = await calls(session, ("add", {"a": 2, "b": 3}), ("add", {"a": "x", "b": 3}), ("fly", {}))
        if kind == "openreward":
            out = await session.call_terminal_tool("The answer is 4.")
            seen["messages"] = [[message.role, message.blocks[0].text] for message in await session.get_messages()]
        else:
            out = await session.call_tool("reply", {"message": "The answer is 4."})
        seen["end"] = [out.reward, out.finished]
        seen["after"] = await calls(session, ("add", {"a": 1, "b": 1}))
    async with named.session(split="train", index=2) as session:
        seen["by index"] = "".join(block.text for block in await session.get_prompt())
        seen["long"] = (await calls(session, ("say", {"words": "          x" * 2000})))[0][0][0] == "          x" * 2000
        seen["broken"] = await calls(session, ("explode", {}))
    return seen


print(json.dumps(asyncio.run(main())), flush=True)
os._exit(0)  # the clients' background threads need not be waited for
