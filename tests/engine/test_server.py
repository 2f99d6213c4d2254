"""``POST /generate``: tokens, logprobs, and the options of a request."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from rollouts.errors import ConfigError

EOS = 502
QUESTION = "<|im_start|>user\nWhat is 5 + 7?<|im_end|>\n<|im_start|>assistant\n"
FREE = {"ignore_eos": True, "max_new_tokens": 24}


def sampled_logprobs(answer: Any) -> list[float]:
    triples = answer["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in triples] == answer["output_ids"]
    return [logprob for logprob, _, _ in triples]


async def together(calls: list[Callable[[], Any]]) -> list[Any]:
    """All responses to concurrent requests."""
    answers: dict[int, Any] = {}

    async def one(number: int) -> None:
        answers[number] = await calls[number]()

    async with anyio.create_task_group() as tasks:
        for number in range(len(calls)):
            tasks.start_soon(one, number)
    return [answers[number] for number in range(len(calls))]


# -- logprobs ---------------------------------------------------------------------------------------------------------


async def test_a_scoring_call_has_the_most_probable_ids_of_each_position(client: Any) -> None:
    """SGLang's ``input_top_logprobs``: as wide as ``input_token_logprobs``, and null first; with those of the reply.

    Each entry is ``[logprob, id, null]``, descending (SGLang 0.5.23, managers/tokenizer_manager.py).
    """
    prompt = [*range(1, 120)]
    ask = {"input_ids": prompt, "return_logprob": True, "top_logprobs_num": 4}
    whole = (await client.generate(**ask, sampling_params={"max_new_tokens": 0}, logprob_start_len=0))["meta_info"]
    full = {**ask, "top_logprobs_num": 509, "sampling_params": {"max_new_tokens": 0}, "logprob_start_len": 0}
    every = (await client.generate(**full))["meta_info"]["input_top_logprobs"]
    tops, own = whole["input_top_logprobs"], whole["input_token_logprobs"]
    assert len(tops) == len(own) == len(prompt)
    assert tops[0] is None
    for position, (found, (logprob, token, _)) in enumerate(zip(tops[1:], own[1:], strict=True), start=1):
        values = [value for value, _, _ in found]
        assert values == sorted(values, reverse=True)
        assert len({one for _, one, _ in found}) == 4
        assert {one: value for value, one, _ in every[position]}[token] == pytest.approx(logprob, abs=1e-4)
        assert sum(math.exp(value) for value in values) <= 1 + 1e-4
    answer = await client.generate(**ask, sampling_params={"max_new_tokens": 3, "temperature": 0}, logprob_start_len=80)
    part = answer["meta_info"]
    assert [len(part[f"{name}_top_logprobs"]) for name in ("input", "output")] == [39, len(answer["output_ids"])]
    assert part["output_top_logprobs"][0][0][:2] == part["output_token_logprobs"][0][:2]


async def test_logprobs_are_those_of_a_teacher_forced_pass(client: Any, reference: Callable[..., list[float]]) -> None:
    """Through ragged prefill, reuse, copies and continuous batching, each logprob equals the policy's."""
    rng = random.Random(0)
    prompts = [[7] * rng.randint(0, 90) + rng.choices(range(500), k=rng.randint(1, 40)) for _ in range(24)]
    temperatures = [rng.choice([0.7, 1.0, 1.3]) for _ in prompts]

    def call(prompt: list[int], temperature: float) -> Callable[[], Any]:
        sampling = {**FREE, "max_new_tokens": rng.randint(1, 40), "temperature": temperature}
        return lambda: client.generate(input_ids=prompt, sampling_params=sampling, return_logprob=True)

    answers = await together([call(*pair) for pair in zip(prompts, temperatures, strict=True)])
    follow_ups = [prompt + answer["output_ids"] + [3, 1] for prompt, answer in zip(prompts, answers, strict=True)]
    more = await together([call(*pair) for pair in zip(follow_ups, temperatures, strict=True)])
    for prompt, temperature, answer in zip(prompts + follow_ups, temperatures * 2, answers + more, strict=True):
        expected = reference(prompt, answer["output_ids"], temperature=temperature)
        assert sampled_logprobs(answer) == pytest.approx(expected, abs=2e-4)
    assert sum(answer["meta_info"]["cached_tokens"] for answer in more) > 500


async def test_every_family_is_exact(
    tiny_folder: Path, serving: Callable[..., Any], reference: Callable[..., list[float]]
) -> None:
    """Random Qwen3, Llama and Qwen2 models agree with transformers, without a tokenizer in their folder."""
    async with serving(tiny_folder) as client:
        prompts = [[(7 * number + seed) % 97 for number in range(5 + 3 * seed)] for seed in range(6)]
        answers = await client.generate(input_ids=prompts, sampling_params=FREE, return_logprob=True)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert "text" not in answer
            expected = reference(prompt, answer["output_ids"], folder=tiny_folder)
            assert sampled_logprobs(answer) == pytest.approx(expected, abs=1e-5)


async def test_a_reply_does_not_depend_on_what_else_is_in_the_batch(serving: Callable[..., Any]) -> None:
    """With a seed, the tokens alone and among others are the same, their logprobs to rounding."""
    prompts = [[(11 * number + seed) % 500 for number in range(10 + 7 * seed)] for seed in range(8)]
    requests = [
        {"input_ids": prompt, "sampling_params": {**FREE, "sampling_seed": seed}, "return_logprob": True}
        for seed, prompt in enumerate(prompts)
    ]
    async with serving() as client:
        alone = [await client.generate(**request) for request in requests]
    async with serving() as client:
        crowd = await together([lambda request=request: client.generate(**request) for request in requests])
    for one, other in zip(alone, crowd, strict=True):
        assert one["output_ids"] == other["output_ids"]
        assert sampled_logprobs(one) == pytest.approx(sampled_logprobs(other), abs=1e-4)


async def test_greedy_logprobs_are_raw(client: Any, reference: Callable[..., list[float]]) -> None:
    """Temperature has no effect on greedy sampling."""
    sampling = {**FREE, "temperature": 0.5, "top_k": 1}
    answer = await client.generate(input_ids=[5, 6, 7], sampling_params=sampling, return_logprob=True)
    assert sampled_logprobs(answer) == pytest.approx(reference([5, 6, 7], answer["output_ids"]), abs=1e-4)


async def test_prompt_logprobs_are_scored_without_sampling(client: Any, reference: Callable[..., list[float]]) -> None:
    """``max_new_tokens: 0`` with ``logprob_start_len: 0`` is a scoring call; its first entry has no logprob."""
    prompt = [(13 * number) % 500 for number in range(150)]
    answer = await client.generate(
        input_ids=prompt, sampling_params={"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0
    )
    assert answer["output_ids"] == []
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    first, *others = answer["meta_info"]["input_token_logprobs"]
    assert first == [None, prompt[0], None]
    assert [token for _, token, _ in others] == prompt[1:]
    assert [logprob for logprob, _, _ in others] == pytest.approx(reference(prompt[:1], prompt[1:]), abs=2e-4)


@pytest.mark.parametrize(("prompt", "start"), [([5], 0), ([5, 6, 7], 2)])
async def test_scoring_only_the_last_token_samples_nothing(client: Any, prompt: list[int], start: int) -> None:
    """A prompt that leaves nothing to score is computed and not continued."""
    ask = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True}
    for _ in range(2):
        answer = await client.generate(**ask, logprob_start_len=start)
        assert answer["output_ids"] == []
        assert answer["meta_info"]["input_token_logprobs"] == [[None, prompt[-1], None]]


async def test_prompt_logprobs_from_a_position_leave_the_cache_before_it(client: Any) -> None:
    """Scoring from position s recomputes nothing before s, and gives the same numbers as scoring all."""
    prompt = [(13 * number) % 500 for number in range(90)]
    ask = {"input_ids": prompt, "sampling_params": {**FREE, "max_new_tokens": 3}, "return_logprob": True}
    whole = (await client.generate(**ask, logprob_start_len=0))["meta_info"]
    part = (await client.generate(**ask, logprob_start_len=80))["meta_info"]
    assert (whole["cached_tokens"], part["cached_tokens"]) == (0, 80)
    assert part["input_token_logprobs"][0] == [None, prompt[80], None]
    expected = [logprob for logprob, _, _ in whole["input_token_logprobs"][81:]]
    assert [logprob for logprob, _, _ in part["input_token_logprobs"][1:]] == pytest.approx(expected, abs=1e-4)
    assert len(part["output_token_logprobs"]) == 3


# -- the prefix cache -------------------------------------------------------------------------------------------------


async def test_a_continued_sequence_computes_only_what_is_new(client: Any) -> None:
    """The cached tokens of a next turn are the whole last turn but its last token, which was never fed."""
    prompt = list(range(40))
    first = await client.generate(input_ids=prompt, sampling_params=FREE)
    longer = prompt + first["output_ids"] + [9, 8, 7]
    second = await client.generate(input_ids=longer, sampling_params=FREE)
    assert first["meta_info"]["cached_tokens"] == 0
    assert second["meta_info"]["cached_tokens"] == len(prompt) + len(first["output_ids"]) - 1


async def test_siblings_share_the_prefill_of_their_prompt(client: Any) -> None:
    """Of a group that arrives at once, one computes the prompt and the others copy it."""
    prompt = [(3 * number) % 500 for number in range(60)]
    answers = await client.generate(input_ids=[prompt] * 6, sampling_params=FREE)
    assert sorted(answer["meta_info"]["cached_tokens"] for answer in answers) == [0, 59, 59, 59, 59, 59]


async def test_an_extra_key_is_a_cache_of_its_own(client: Any) -> None:
    """Requests with different keys share no prefix."""
    ask = {"input_ids": list(range(30)), "sampling_params": FREE}
    await client.generate(**ask)
    apart = await client.generate(**ask, extra_key="other")
    again = await client.generate(**ask, extra_key="other")
    assert apart["meta_info"]["cached_tokens"] == 0
    assert again["meta_info"]["cached_tokens"] == 29


async def test_more_requests_than_slots_are_all_served(serving: Callable[..., Any]) -> None:
    """A request without a slot waits, then evicts the least recently used."""
    async with serving(slots=2) as client:
        answers = await client.generate(input_ids=[[number, 1, 2] for number in range(9)], sampling_params=FREE)
    assert [len(answer["output_ids"]) for answer in answers] == [24] * 9


# -- seeds ------------------------------------------------------------------------------------------------------------


async def test_a_seed_decides_the_reply(client: Any) -> None:
    """The same seed gives the same reply, another seed another."""
    ask = {"input_ids": [1, 2, 3], "return_logprob": True}
    first, again, other = [
        await client.generate(**ask, sampling_params={**FREE, "temperature": 2.0, "sampling_seed": seed})
        for seed in (5, 5, 6)
    ]
    assert first["output_ids"] == again["output_ids"]
    assert first["output_ids"] != other["output_ids"]


async def test_without_a_seed_requests_differ(client: Any) -> None:
    """Equal requests without a seed get different draws, also in one batch."""
    answers = await client.generate(input_ids=[[1, 2, 3]] * 4, sampling_params={**FREE, "temperature": 2.0})
    assert len({tuple(answer["output_ids"]) for answer in answers}) == 4


# -- ends -------------------------------------------------------------------------------------------------------------


async def test_the_stop_token_stays_in_the_ids_and_leaves_the_text(client: Any) -> None:
    """The model's stop token ends the reply; it is counted, and trimmed from the text only."""
    answer = await client.generate(text=QUESTION, sampling_params={"temperature": 0}, return_logprob=True)
    assert answer["output_ids"][-1] == EOS
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
    assert answer["meta_info"]["completion_tokens"] == len(answer["output_ids"]) == len(sampled_logprobs(answer))
    assert "<|im_end|>" not in answer["text"]


async def test_a_stop_token_id_of_the_request_ends_the_reply(client: Any) -> None:
    """``stop_token_ids`` add to the model's; ``no_stop_trim`` leaves the token in the text."""
    whole = await client.generate(text=QUESTION, sampling_params={"temperature": 0})
    stop = whole["output_ids"][3]
    sampling = {"temperature": 0, "stop_token_ids": [stop]}
    cut = await client.generate(text=QUESTION, sampling_params=sampling)
    kept = await client.generate(text=QUESTION, sampling_params={**sampling, "no_stop_trim": True})
    assert cut["output_ids"] == whole["output_ids"][: whole["output_ids"].index(stop) + 1]
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert kept["text"].startswith(cut["text"])
    assert len(kept["text"]) > len(cut["text"])


async def test_ignore_eos_disables_the_stop_token_ids_too(client: Any) -> None:
    """A quirk of SGLang that clients must be tested against; stop strings still work."""
    whole = await client.generate(text=QUESTION, sampling_params={"temperature": 0})
    sampling = {"temperature": 0, "stop_token_ids": [whole["output_ids"][3]], "ignore_eos": True, "max_new_tokens": 60}
    word = whole["text"][6:12]
    answer = await client.generate(text=QUESTION, sampling_params=sampling)
    stopped = await client.generate(text=QUESTION, sampling_params={**sampling, "stop": word})
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 60}
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": word}


async def test_a_stop_string_is_cut_from_the_text_and_its_tokens_stay(client: Any, tokenizer: Any) -> None:
    """Text and ids disagree by design: the ids hold all that was sampled."""
    whole = await client.generate(text=QUESTION, sampling_params={"temperature": 0})
    word = whole["text"][6:12]
    answer = await client.generate(text=QUESTION, sampling_params={"temperature": 0, "stop": [word, "nowhere"]})
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": word}
    assert answer["text"] == whole["text"][: whole["text"].index(word)]
    assert word in tokenizer.decode(answer["output_ids"])
    assert answer["output_ids"] == whole["output_ids"][: len(answer["output_ids"])]


async def test_a_stop_comes_before_the_length(client: Any) -> None:
    """Where the last token of the budget ends a stop string or is a stop id; the string comes first."""
    whole = await client.generate(text=QUESTION, sampling_params={"temperature": 0})
    assert whole["output_ids"][-1] == EOS
    params = {"temperature": 0, "max_new_tokens": len(whole["output_ids"])}
    answer = await client.generate(text=QUESTION, sampling_params=params)
    assert answer["output_ids"] == whole["output_ids"]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
    answer = await client.generate(text=QUESTION, sampling_params={**params, "stop": "<|im_end|>"})
    assert answer["output_ids"] == whole["output_ids"]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "<|im_end|>"}


async def test_the_text_of_stop_strings_has_special_tokens(client: Any) -> None:
    """As in SGLang: a stop string may be, or contain, the text of a special token."""
    sampling = {"temperature": 0, "ignore_eos": True, "stop": ".<|im_end|>", "max_new_tokens": 100}
    answer = await client.generate(text=QUESTION, sampling_params=sampling)
    assert answer["output_ids"][-1] == EOS
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": ".<|im_end|>"}


async def test_no_stop_token_is_sampled_before_the_minimum(client: Any) -> None:
    """``min_new_tokens`` keeps a reply going."""
    bias = {str(EOS): 50.0}
    short = await client.generate(input_ids=[1, 2], sampling_params={"logit_bias": bias})
    long = await client.generate(input_ids=[1, 2], sampling_params={"logit_bias": bias, "min_new_tokens": 7})
    assert (len(short["output_ids"]), len(long["output_ids"])) == (1, 8)


async def test_no_limit_fills_the_context(serving: Callable[..., Any]) -> None:
    """``max_new_tokens: null`` ends 2 tokens before the context does, as SGLang's does."""
    async with serving(max_context=50) as client:
        answer = await client.generate(input_ids=[1] * 20, sampling_params={"max_new_tokens": None, "ignore_eos": True})
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 28}


# -- forms ------------------------------------------------------------------------------------------------------------


async def test_text_and_its_ids_are_the_same_request(client: Any, tokenizer: Any) -> None:
    """A text prompt is encoded by the folder's tokenizer; the prompt's ids come back on request."""
    ids = tokenizer.encode(QUESTION)
    by_text = await client.generate(text=QUESTION, sampling_params={"temperature": 0}, return_prompt_token_ids=True)
    by_ids = await client.generate(input_ids=ids, sampling_params={"temperature": 0})
    assert by_text["prompt_token_ids"] == ids
    assert by_text["output_ids"] == by_ids["output_ids"]
    assert by_text["meta_info"]["prompt_tokens"] == len(ids)


async def test_a_batch_is_answered_in_its_order_with_numbered_rids(client: Any) -> None:
    """Each prompt may have different parameters; a rid for the batch is numbered."""
    answers = await client.generate(
        input_ids=[[1], [2, 3]],
        sampling_params=[{**FREE, "max_new_tokens": 2}, {**FREE, "max_new_tokens": 5}],
        return_logprob=[True, False],
        rid="b",
    )
    assert [answer["meta_info"]["id"] for answer in answers] == ["b_0", "b_1"]
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [1, 2]
    assert [len(answer["output_ids"]) for answer in answers] == [2, 5]
    assert ["output_token_logprobs" in answer["meta_info"] for answer in answers] == [True, False]


async def test_a_stream_grows_and_ends_with_done(client: Any) -> None:
    """Each event contains all earlier output; only the last has a finish reason."""
    ask = {"input_ids": [1, 2, 3], "sampling_params": {**FREE, "sampling_seed": 3}, "return_logprob": True}
    *events, done = [event async for event in client.stream(**ask)]
    whole = await client.generate(**ask)
    assert done == "[DONE]"
    for event, later in itertools.pairwise(events):
        assert event["meta_info"]["finish_reason"] is None
        assert later["output_ids"][: len(event["output_ids"])] == event["output_ids"]
        assert len(sampled_logprobs(event)) == len(event["output_ids"]) < len(later["output_ids"])
    assert events[-1]["output_ids"] == whole["output_ids"]
    assert events[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 24}


async def test_a_streamed_batch_numbers_its_events(client: Any) -> None:
    """``index`` identifies the prompt of an event; each prompt ends once."""
    events = [event async for event in client.stream(input_ids=[[1], [2]], sampling_params=FREE)]
    ends = [event["index"] for event in events[:-1] if event["meta_info"]["finish_reason"]]
    assert sorted(ends) == [0, 1]


async def test_the_texts_of_tokens_come_on_request(client: Any, tokenizer: Any) -> None:
    """``return_text_in_logprobs`` fills the third element of each triple."""
    answer = await client.generate(
        text=QUESTION, sampling_params={"temperature": 0}, return_logprob=True, return_text_in_logprobs=True
    )
    triples = answer["meta_info"]["output_token_logprobs"]
    assert [text for _, _, text in triples] == [tokenizer.decode([token]) for token in answer["output_ids"]]


async def load(client: Any, name: str) -> int:
    return int((await client.get("/v1/loads"))[1]["loads"][0][name])


async def test_a_call_that_is_cancelled_is_aborted(client: Any) -> None:
    """A client that stops waiting for its answer leaves nothing running."""
    long = {"ignore_eos": True, "max_new_tokens": 900}
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: client.generate(input_ids=[[1, 2, 3]] * 8, sampling_params=long))
        with anyio.fail_after(10):
            while not await load(client, "num_running_reqs"):
                pass
        tasks.cancel_scope.cancel()
    with anyio.fail_after(10):
        while await load(client, "num_total_reqs"):
            pass


async def test_a_disconnect_ends_a_stream(client: Any) -> None:
    """A client that disconnects leaves nothing running, and its rid is free again."""
    ask = {"input_ids": [1, 2, 3], "sampling_params": {"ignore_eos": True, "max_new_tokens": 900}, "rid": "gone"}
    events = client.stream(**ask)
    assert (await anext(events))["meta_info"]["id"] == "gone"
    await events.aclose()
    with anyio.fail_after(10):
        while await load(client, "num_total_reqs"):
            pass
        while (await client.post("/generate", **{**ask, "sampling_params": FREE}))[0] == 400:
            pass


# -- who may ask --


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example:80"},
        {"Sec-Fetch-Site": "cross-site"},
    ],
)
@pytest.mark.parametrize(
    "path", ["abort_request", "update_weights_from_disk", "flush_cache", "generate", "server_info"]
)
async def test_28_a_web_page_is_refused(client: Any, path: str, headers: dict[str, str]) -> None:
    """A foreign origin, or a Host that is not this machine, reaches no route, whatever the content type."""
    ask = client.session.get if path == "server_info" else client.session.post
    data = {} if path == "server_info" else {"data": b'{"abort_all": true}'}
    async with ask(f"{client.url}/{path}", headers={"Content-Type": "text/plain", **headers}, **data) as response:
        assert response.status == 403
        assert next(iter(headers)) in await response.text()


async def test_28_a_public_address_wants_a_key(serving: Any) -> None:
    """Without a key nothing is served; with one, requests need it, and any Host is accepted."""
    with pytest.raises(ConfigError, match=r"host: got '0\.0\.0\.0'; expected 127\.0\.0\.1, or a key"):
        async with serving(host="0.0.0.0"):
            pass
    async with serving(host="0.0.0.0", api_key="secret") as client:
        url = client.url.replace("0.0.0.0", "127.0.0.1")
        found = []
        for key in ("", "Bearer other", "Bearer secret"):
            async with client.session.get(
                url + "/model_info", headers={"Authorization": key, "Host": "gpu-7"}
            ) as reply:
                found.append(reply.status)
        assert found == [401, 401, 200]


async def test_a_request_that_is_not_http_prints_nothing(client: Any, caplog: pytest.LogCaptureFixture) -> None:
    """It is answered with 400; the engine's output is the log of a run."""
    host, port = client.url.removeprefix("http://").split(":")
    async with await anyio.connect_tcp(host, int(port)) as stream:
        await stream.send(b"GET / HTTP/1.1\r\nno colon\r\n\r\n")
        assert (await stream.receive()).split()[1] == b"400"
    assert caplog.records == []
