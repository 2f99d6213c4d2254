"""LoRA adapters of the engine: what it computes, what it caches, and when an adapter is loaded and unloaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

pytest.importorskip("torch", reason="torch is not installed")

from tests.peft_folders import merged_folder, write_adapter

PROMPT = [(17 * number) % 500 for number in range(60)]
TOLERANCE = 5e-5
"""The rounding of float32: the same sequence alone and in batches of other shapes differs by up to 3.6e-5 here."""
LONG = {"ignore_eos": True, "max_new_tokens": 900}


def asked(prompt: list[int] = PROMPT, tokens: int = 24, **fields: Any) -> dict[str, Any]:
    params = {"max_new_tokens": tokens, "ignore_eos": True}
    return {"input_ids": prompt, "return_logprob": True, "sampling_params": params, **fields}


def columns(answer: Any) -> tuple[list[int], list[float]]:
    """The sampled ids and their logprobs."""
    return answer["output_ids"], [triple[0] for triple in answer["meta_info"]["output_token_logprobs"]]


async def load(client: Any, name: str, folder: Path) -> None:
    status, answer = await client.post("/load_lora_adapter", lora_name=name, lora_path=str(folder))
    assert status == 200, answer
    assert answer["loaded_adapters"][name] == str(folder)


@pytest.mark.parametrize("targets", [["q_proj"], ["up_proj", "down_proj"], ["k_proj"], None])
@pytest.mark.parametrize("rslora", [False, True])
async def test_a_logprob_is_that_of_the_base_model_with_the_adapter(
    client: Any, reference: Callable[..., list[float]], tmp_path: Path, targets: list[str] | None, rslora: bool
) -> None:
    """It is that of the merged weights; an adapter of other targets, another rank or rsLoRA too."""
    config: dict[str, Any] = {} if targets is None else {"targets": targets}
    adapter = write_adapter(tmp_path / "a", 1, rank=6, use_rslora=rslora, **config)
    await load(client, "a", adapter)
    merged = merged_folder(adapter, tmp_path / "merged")
    ids, logprobs = columns(await client.generate(**asked(lora_path="a")))
    assert logprobs == pytest.approx(reference(PROMPT, ids, folder=merged), abs=TOLERANCE)
    assert logprobs != pytest.approx(reference(PROMPT, ids), abs=1e-2)


async def test_the_rows_of_a_batch_have_their_own_adapters(
    client: Any, reference: Callable[..., list[float]], tmp_path: Path
) -> None:
    """Requests of three adapters and of none that run together, with prompts of different lengths."""
    folders: dict[str, Path | None] = {"": None}
    for seed, name in enumerate(("a", "b", "c")):
        adapter = write_adapter(tmp_path / name, seed, rank=2 + seed)
        await load(client, name, adapter)
        folders[name] = merged_folder(adapter, tmp_path / f"merged-{name}")
    jobs = [(name, PROMPT[: 60 - 7 * number]) for number, name in enumerate([*folders, *folders])]
    answers: dict[int, Any] = {}

    async def ask(number: int, name: str, prompt: list[int]) -> None:
        answers[number] = await client.generate(**asked(prompt, lora_path=name or None))

    async with anyio.create_task_group() as tasks:
        for number, (name, prompt) in enumerate(jobs):
            tasks.start_soon(ask, number, name, prompt)
    for number, (name, prompt) in enumerate(jobs):
        ids, logprobs = columns(answers[number])
        folder = folders[name]
        expected = reference(prompt, ids) if folder is None else reference(prompt, ids, folder=folder)
        assert logprobs == pytest.approx(expected, abs=TOLERANCE), name


async def test_no_two_adapters_share_a_prefix(client: Any, tmp_path: Path) -> None:
    """The same prompt is computed again for each adapter and for none; the second request of each finds it.

    Nor does an adapter that was loaded again under its name share a prefix with the first one.
    """
    for seed, name in enumerate(("a", "b")):
        await load(client, name, write_adapter(tmp_path / name, seed))

    async def cached(name: str | None) -> int:
        answer = await client.generate(**asked(tokens=1, lora_path=name))
        return int(answer["meta_info"]["cached_tokens"])

    assert [await cached(name) for name in (None, "a", "b")] == [0, 0, 0]
    assert [await cached(name) for name in (None, "a", "b")] == [59, 59, 59]
    await client.post("/unload_lora_adapter", lora_name="a")
    await load(client, "a", tmp_path / "b")
    assert await cached("a") == 0


async def test_the_prompt_is_scored_with_the_adapter(
    client: Any, reference: Callable[..., list[float]], tmp_path: Path
) -> None:
    """Also the logprobs of the prompt are those of base and adapter."""
    adapter = write_adapter(tmp_path / "a", 1)
    await load(client, "a", adapter)
    answer = await client.generate(**asked(tokens=0, logprob_start_len=0, lora_path="a"))
    scores = [triple[0] for triple in answer["meta_info"]["input_token_logprobs"][1:]]
    merged = merged_folder(adapter, tmp_path / "merged")
    assert scores == pytest.approx(reference(PROMPT[:1], PROMPT[1:], folder=merged), abs=TOLERANCE)


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/generate", {"lora_path": "a-v2"}, "has never been loaded: a-v2"),
        ("/load_lora_adapter", {"lora_name": "a", "lora_path": "FOLDER"}, "already loaded"),
        ("/load_lora_adapter", {"lora_name": "b", "lora_path": "/no/such/folder"}, "/no/such/folder"),
        ("/unload_lora_adapter", {"lora_name": "b"}, "does not exist"),
    ],
)
async def test_a_request_about_the_wrong_adapter_is_a_400(
    client: Any, tmp_path: Path, path: str, body: dict[str, str], expected: str
) -> None:
    """An unknown name, a name that is taken, and a folder that is not there."""
    adapter = write_adapter(tmp_path / "a", 1)
    await load(client, "a", adapter)
    fields = {name: value.replace("FOLDER", str(adapter)) for name, value in body.items()}
    status, answer = await client.post(path, **{**(asked() if path == "/generate" else {}), **fields})
    assert status == 400
    assert expected in str(answer)


async def test_an_adapter_of_another_model_is_refused(client: Any, tmp_path: Path, tiny_folder: Path) -> None:
    """The error names the layer and both shapes."""
    folder = write_adapter(tmp_path / "a", 1, base=tiny_folder, targets=["q_proj"])
    status, answer = await client.post("/load_lora_adapter", lora_name="a", lora_path=str(folder))
    assert status == 400
    assert "layers.0.self_attn.q_proj" in answer["error_message"]
    assert "as the served model" in answer["error_message"]


async def test_loaded_adapters_are_listed(client: Any, tmp_path: Path) -> None:
    """With their folder and the model to which they belong."""
    await load(client, "a", write_adapter(tmp_path / "a", 1))
    base, adapter = (await client.get("/v1/models"))[1]["data"]
    assert (adapter["id"], adapter["root"], adapter["parent"]) == ("a", str(tmp_path / "a"), base["id"])


async def test_an_adapter_is_unloaded_after_its_last_request(
    client: Any, reference: Callable[..., list[float]], tmp_path: Path
) -> None:
    """The running request ends on it; from the unloading on, no other may name it."""
    adapter = write_adapter(tmp_path / "a", 1)
    await load(client, "a", adapter)
    events = client.stream(input_ids=PROMPT, sampling_params=LONG, return_logprob=True, rid="one", lora_path="a")
    first = await anext(events)
    unloaded = anyio.Event()

    async def unload() -> None:
        assert (await client.post("/unload_lora_adapter", lora_name="a"))[0] == 200
        unloaded.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(unload)
        with anyio.fail_after(10):
            while len((await client.get("/v1/models"))[1]["data"]) > 1:
                pass
        assert (await client.post("/generate", **asked(lora_path="a")))[0] == 400
        assert not unloaded.is_set()
        await client.post("/abort_request", rid="one")
    last = [event async for event in events if event != "[DONE]"][-1]
    ids, logprobs = columns(last)
    assert len(ids) >= len(first["output_ids"])
    assert logprobs == pytest.approx(
        reference(PROMPT, ids, folder=merged_folder(adapter, tmp_path / "merged")), abs=TOLERANCE
    )


async def test_an_adapter_stays_when_the_weights_change(
    client: Any, reference: Callable[..., list[float]], tmp_path: Path, other_weights: Path
) -> None:
    """It then changes the new weights."""
    adapter = write_adapter(tmp_path / "a", 1)
    await load(client, "a", adapter)
    await client.generate(**asked(tokens=1, lora_path="a"))
    assert (await client.post("/update_weights_from_disk", model_path=str(other_weights)))[0] == 200
    ids, logprobs = columns(await client.generate(**asked(lora_path="a")))
    merged = merged_folder(adapter, tmp_path / "merged", base=other_weights)
    assert logprobs == pytest.approx(reference(PROMPT, ids, folder=merged), abs=TOLERANCE)
