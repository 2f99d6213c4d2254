"""OpenRLHF 0.11: its own Experience of our rows, and our agent as an executor over a vLLM engine."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollouts.dtypes import Endpoint, Limits, Prompt, SamplingParams, packed_tokens
from rollouts.engine import DEMO_MODEL
from rollouts.environments import SingleTurnEnvironment
from rollouts.errors import ConfigError, ContextOverflow, EndpointRefused
from rollouts.inference.base import CompletionRequest
from rollouts.integrations.episodes import Episodes
from rollouts.integrations.openrlhf import AgentInstanceEnvironment, OpenRLHFPolicy, execute, to_response
from rollouts.integrations.token_episodes import generate_token_batch
from rollouts.renderer import load_tokenizer
from rollouts.testing.policy import ScriptedPolicy
from rollouts.training import Status
from rollouts.training.batch import group_advantages
from tests.trainer_samples import columns, scored_groups, tiny_model, token_logprobs


def test_a_response_is_the_row_with_the_ranges_of_its_replies() -> None:
    """Ids and logprobs as wide as each other, the mask as ranges, no unanswered end."""
    for sample in scored_groups(2, 3):
        tokens, mask, logprobs = columns(sample)
        response = to_response(sample)
        assert (response["observation_tokens"], response["rollout_log_probs"]) == (tokens, logprobs)
        sampled = {place for start, stop in response["action_ranges"] for place in range(start, stop)}
        assert [place in sampled for place in range(len(tokens))] == mask
        assert response["reward"] == response["scores"] == sample.reward
        assert response["truncated"] == (sample.status is Status.TRUNCATED)
        assert (response["prompt"], response["label"]) == (sample.prompt, sample.label)


@pytest.mark.parametrize(
    ("field", "value"),
    [("status", Status.FAILED), ("reward", None), ("loss_multiplier", 0.5), ("reward", float("nan"))],
)
def test_what_openrlhf_cannot_carry_is_refused(field: str, value: Any) -> None:
    """By the name of the field."""
    (sample,) = scored_groups(1, 1)
    setattr(sample, field, value)
    with pytest.raises(ConfigError, match=rf"\.{field}: got"):
        to_response(sample)


def test_a_row_that_openrlhf_would_cut_is_refused() -> None:
    """It cuts at max_len without a word, and the reward would be that of another text."""
    (sample,) = scored_groups(1, 1)
    length = len(columns(sample)[0])
    assert to_response(sample, max_length=length)
    with pytest.raises(ConfigError, match=rf"tokens: got {length}; expected at most max_length={length - 1}"):
        to_response(sample, max_length=length - 1)


ABSENT = ("vllm", "deepspeed", "flash_attn")


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """vLLM, DeepSpeed and flash-attn, which their modules import and these tests do not run."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = self._attribute  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """A module of classes without content."""

    def _attribute(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


@pytest.fixture
def generator() -> Any:
    """Their SamplesGenerator; its module, and that of their losses, are imported with :data:`ABSENT` left out."""
    pytest.importorskip("openrlhf.utils.agent")
    import transformers.integrations.deepspeed  # noqa: F401 - before the stub, which it would take for the real one

    absent = Absent()
    sys.meta_path.insert(0, absent)
    try:
        import openrlhf.models.loss  # noqa: F401 - the test of a step reads it
        from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
    finally:
        sys.meta_path.remove(absent)
        for name in [name for name in sys.modules if name.partition(".")[0] in ABSENT]:
            del sys.modules[name]
    return object.__new__(SamplesGenerator)


@pytest.mark.trainer
@pytest.mark.filterwarnings("default")
def test_their_experience_has_our_rows(generator: Any, compared: Callable[..., None]) -> None:
    """_process_response_into_experience: sequences, action mask, logprobs and reward; shifted by one as theirs are."""
    for sample in scored_groups(3, 4):
        tokens, mask, logprobs = columns(sample)
        experience = generator._process_response_into_experience(to_response(sample), max_len=4096)
        assert experience.sequences[0].tolist() == tokens
        assert (experience.action_mask[0] == 1).tolist() == mask[1:]
        assert np.array_equal(experience.rollout_log_probs[0].numpy(), np.array(logprobs[1:], np.float32))
        assert experience.rewards.item() == np.float32(sample.reward)
    compared("OpenRLHF 0.11.2", "b", "experiences: tokens, mask, logprobs, reward", 0.0, note="vllm, deepspeed stubbed")


@pytest.mark.trainer
@pytest.mark.filterwarnings("default")
def test_one_step_of_their_loss_follows_the_advantages(generator: Any, compared: Callable[..., None]) -> None:
    """PolicyLoss on their experiences of our rows and a tiny model: good rollouts become likelier."""
    torch = pytest.importorskip("torch")
    losses = pytest.importorskip("openrlhf.models.loss")
    samples, model = scored_groups(), tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = [generator._process_response_into_experience(to_response(one), max_len=4096) for one in samples]

    def logprobs(experience: Any) -> Any:
        return token_logprobs(model, experience.sequences)[:, 1:]

    before = [logprobs(experience).detach() for experience in made]
    advantages = [
        float(one) * experience.action_mask for one, experience in zip(group_advantages(samples), made, strict=True)
    ]
    for experience, old, advantage in zip(made, before, advantages, strict=True):
        losses.PolicyLoss()(logprobs(experience), old, advantage, experience.action_mask)[0].backward()
    optimizer.step()
    gained = [((logprobs(one) - old) * adv).sum() for one, old, adv in zip(made, before, advantages, strict=True)]
    assert sum(gained) > 0
    compared(
        "OpenRLHF 0.11.2",
        "step",
        "one step of PolicyLoss follows the advantages",
        0.0,
        note="tiny model; flash-attn stubbed",
    )


class Engine:
    """A strict fake of the executor's ``llm_engine``: objects as vLLM returns them."""

    def __init__(self, ids: list[int], *, reason: str = "stop", logprobs: bool = True) -> None:
        self.ids, self.reason, self.logprobs = ids, reason, logprobs
        self.requests: list[tuple[list[int], Any]] = []

    async def generate(self, prompt_token_ids: list[int], sampling_params: Any, multi_modal_data: Any = None) -> Any:
        assert multi_modal_data is None
        self.requests.append((prompt_token_ids, sampling_params))
        entries = [{token: SimpleNamespace(logprob=-0.25)} for token in self.ids] if self.logprobs else None
        output = SimpleNamespace(token_ids=tuple(self.ids), logprobs=entries, finish_reason=self.reason, text="")
        return SimpleNamespace(outputs=[output])


def asked() -> Any:
    return SimpleNamespace(
        temperature=0.8, top_p=0.9, top_k=0, max_tokens=16, min_tokens=1, logprobs=None, stop_token_ids=None
    )


async def test_the_engine_is_a_policy() -> None:
    """The trainer's own parameters, with the budget and stop ids of the call; they stay as they were."""
    engine, given = Engine([7, 8]), asked()
    policy = OpenRLHFPolicy(engine, given, 64)
    done = await policy.complete(
        CompletionRequest(packed_tokens([1, 2]), SamplingParams(max_new_tokens=4), stop_token_ids=(9,))
    )
    assert (done.tokens.tolist(), done.logprobs.tolist(), done.finish_reason) == ([7, 8], [-0.25] * 2, "stop")
    ((tokens, request),) = engine.requests
    assert (tokens, request.max_tokens, request.stop_token_ids, request.logprobs) == ([1, 2], 4, [9], 1)
    assert given == asked()
    with pytest.raises(ConfigError, match=r"SamplingParams\.stop"):
        await policy.complete(CompletionRequest(packed_tokens([1]), SamplingParams(stop=("x",))))
    with pytest.raises(ContextOverflow, match="context of 64"):
        await policy.complete(CompletionRequest(packed_tokens([1]), SamplingParams(max_new_tokens=64)))
    with pytest.raises(EndpointRefused, match="no logprobs"):
        await OpenRLHFPolicy(Engine([7], logprobs=False), asked(), 64).complete(
            CompletionRequest(packed_tokens([1]), SamplingParams(max_new_tokens=4))
        )


def right(sample: Any) -> float:
    return float(sample.label in sample.response)


async def test_an_executor_plays_one_rollout() -> None:
    """Their arguments, our agent: the response of a scored rollout, with the prompt as it came."""
    tokenizer = load_tokenizer(DEMO_MODEL)
    reply = tokenizer.encode("It is 5.<|im_end|>", add_special_tokens=False)
    episodes = Episodes(environment_cls=SingleTurnEnvironment, limits=Limits(), reward_fn=right)
    response = await execute(episodes, "2 + 3?", "5", asked(), 128, tokenizer, Engine(reply))
    assert (response["prompt"], response["label"], response["reward"]) == ("2 + 3?", "5", 1.0)
    ((start, stop),) = response["action_ranges"]
    assert response["observation_tokens"][start:stop] == reply
    assert "2 + 3?" in tokenizer.decode(response["observation_tokens"][:start])
    with pytest.raises(ConfigError, match="images"):
        await execute(episodes, "2 + 3?", "5", asked(), 128, tokenizer, Engine(reply), images=["x.png"])


class Instance:
    """An agent instance of OpenRLHF: two rounds of feedback, with the markup that it writes itself."""

    def __init__(self, **extra: Any) -> None:
        self.extra, self.turns = extra, 0

    async def reset(self, states: dict[str, Any], **_: Any) -> dict[str, Any]:
        return {"observation": f"Human: {states['observation']}\n\nAssistant: "}

    async def step(self, states: dict[str, Any], **_: Any) -> dict[str, Any]:
        self.turns += 1
        assert states["observation_text"].startswith("Human: 2 + 3?")
        right = states["label"] in states["action_text"]
        return {
            "rewards": np.float32(right),
            "environment_feedback": "<|im_end|>\n\nHuman: Again.\n\nAssistant: ",
            "done": self.turns == 3,
            "scores": float(self.turns),
            "extra_logs": {"turns": float(self.turns)},
            **self.extra,
        }


async def instance_played(tokenizer: Any, **extra: Any) -> Any:
    texts = iter(["It is 4.<|im_end|>", "It is 5.<|im_end|>", "5, as I said.<|im_end|>"])
    (sample,) = await generate_token_batch(
        [Prompt("2 + 3?", label="5")],
        environment_cls=lambda: AgentInstanceEnvironment(lambda: Instance(**extra), tokenizer),
        decode=tokenizer.decode,
        endpoint=Endpoint(model="trained"),
        policy=ScriptedPolicy(lambda _: tokenizer.encode(next(texts), add_special_tokens=False)),
    )
    return sample


async def test_an_agent_instance_is_played() -> None:
    """Prompt and feedback are encoded as they are; what a rollout cannot take is refused by name."""
    tokenizer = load_tokenizer(DEMO_MODEL)
    sample = await instance_played(tokenizer)
    assert tokenizer.decode(sample.tokens).startswith("Human: 2 + 3?\n\nAssistant: It is 4.<|im_end|><|im_end|>")
    assert (sample.reward, sample.step_rewards) == (2.0, [0.0, 1.0, 1.0])
    assert (sample.metrics["turns"], sample.metrics["scores"]) == (3.0, 3.0)
    for name in ("sampling_params", "environment_images"):
        failed = await instance_played(tokenizer, **{name: ["x"]})
        assert failed.status is Status.FAILED
        assert f"step()[{name!r}]: got ['x']; expected none" in failed.failure.message


@pytest.mark.trainer
async def test_an_agent_instance_is_played_as_by_their_executor(compared: Callable[..., None]) -> None:
    """MultiTurnAgentExecutor on the same instance and the same replies: ids, ranges, reward and logs."""
    agent = pytest.importorskip("openrlhf.utils.agent")
    tokenizer = load_tokenizer(DEMO_MODEL)
    sample = await instance_played(tokenizer)
    texts = iter(["It is 4.<|im_end|>", "It is 5.<|im_end|>", "5, as I said.<|im_end|>"])

    class Scripted(Engine):
        async def generate(self, *arguments: Any, **options: Any) -> Any:
            text = next(texts)
            self.ids = tokenizer.encode(text, add_special_tokens=False)
            answer = await super().generate(*arguments, **options)
            answer.outputs[0].text, answer.outputs[0].token_ids = text, self.ids
            return answer

    class Theirs(Instance, agent.AgentInstanceBase):  # type: ignore[misc]
        """Of their base class, which their executor asks for."""

    given = SimpleNamespace(max_tokens=64, logprobs=1)
    response = await agent.MultiTurnAgentExecutor(Theirs).execute("2 + 3?", "5", given, 512, tokenizer, Scripted([]))
    ours = to_response(sample)
    stop = ours["action_ranges"][-1][1]
    assert response["action_ranges"] == ours["action_ranges"]
    assert response["observation_tokens"][:stop] == ours["observation_tokens"]
    assert (response["reward"], response["scores"]) == (ours["reward"], sample.metrics["scores"])
    assert response["extra_logs"] == {"turns": sample.metrics["turns"]}
    what = "AgentInstance in our manager and in their executor: ids, ranges, reward"
    compared("OpenRLHF 0.11.2", "c", what, 0.0, note="policy: scripted")
