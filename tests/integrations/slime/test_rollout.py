"""The rollout function: slime's signature, whole batches, state between calls, and the cost of an error."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import random
import re
import subprocess
import sys
from collections import Counter
from typing import Any

import anyio
import pytest

from rollouts.errors import ConfigError, DataExhausted, FilterFailure
from rollouts.integrations.slime import close_rollouts, generate_rollout_batch
from rollouts.integrations.slime.convert import leaves
from rollouts.integrations.slime.records import records
from rollouts.training import Prompt, Sample, Status, check_reward_nonzero_std
from tests.integrations.slime.launches import Launch, Source, made_sample

# -- the contract -----------------------------------------------------------------------------------------------------


def test_the_signature_is_slimes() -> None:
    """Names, kinds and defaults are those of slime's own rollout function."""
    parameters = inspect.signature(generate_rollout_batch).parameters
    assert list(parameters) == ["args", "rollout_id", "data_source", "evaluation"]
    assert {parameter.kind for parameter in parameters.values()} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    assert [parameter.default for parameter in parameters.values()] == [inspect.Parameter.empty] * 3 + [False]


def test_importing_the_door_loads_neither_slime_nor_torch() -> None:
    """slime is imported when a batch is created, torch when a file in its format is written."""
    code = "import sys, rollouts.integrations.slime; print({'slime', 'torch', 'ray'} & sys.modules.keys())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def test_a_batch_is_equal_groups_in_order() -> None:
    """Groups are whole and in slime's order, in any order of completion."""
    rng = random.Random(0)

    async def play(prompt: Prompt) -> list[Sample]:
        for _ in range(rng.randrange(30)):
            await anyio.lowlevel.checkpoint()
        return [made_sample(prompt)]

    launch = Launch(batch_size=6, n=3, play=play, over_sampling_factor=2.0)
    args, source = launch.args(), launch.source()
    for rollout_id in range(3):
        output = generate_rollout_batch(args, rollout_id, source)
        assert isinstance(output, records().train_output)
        assert [len(group) for group in output.samples] == [3] * 6
        firsts = [group[0].group_index for group in output.samples]
        assert firsts == sorted(firsts)
        for group in output.samples:
            assert [sample.index for sample in group] == [group[0].group_index * 3 + member for member in range(3)]


@pytest.mark.usefixtures("thawed")
def test_the_collector_is_calm_until_the_rollouts_are_closed() -> None:
    """A collector pause delays every rollout; closing restores the state of the process."""
    launch = Launch(batch_size=2, n=2)
    generate_rollout_batch(launch.args(), 0, launch.source())
    assert gc.get_freeze_count() > 0
    close_rollouts()
    assert gc.get_freeze_count() == 0


def test_every_sample_can_be_trained_on() -> None:
    """One length for mask, logprobs and response; a prompt token; a finite reward; the status as slime's enum."""
    launch = Launch(batch_size=3, n=2)
    output = generate_rollout_batch(launch.args(), 0, launch.source())
    for sample in leaves(output.samples):
        assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length < len(sample.tokens)
        assert sum(sample.loss_mask) == 8
        assert sample.reward in (0.0, 1.0)
        assert sample.status is records().sample.Status.COMPLETED
        assert sample.rollout_id == sample.index
        assert sample.label == str(sample.group_index)
        assert sample.metadata["row"] == sample.group_index
        assert sample.weight_versions == ["1", "1"]
        assert (sample.prefix_cache_info.cached_tokens, sample.prefix_cache_info.total_prompt_tokens) == (3, 12)
        assert sample.non_generation_time == 0.25


def test_a_recipe_plays_the_prompt_of_each_sample() -> None:
    """Prompt, label and metadata are its own sample's, for the environment, the reward and the batch."""

    class Varied(Source):
        def get_samples(self, num_samples: int) -> list[list[Any]]:
            groups = super().get_samples(num_samples)
            for sample in leaves(groups):
                sample.prompt, sample.label = f"task {sample.index}", str(sample.index)
                sample.metadata = f'{{"variant": {sample.index}}}'
            return groups

    launch = Launch(batch_size=2, n=2, reward=lambda sample: float(sample.label) + sample.metadata["variant"])
    for sample in leaves(generate_rollout_batch(launch.args(), 0, Varied(2)).samples):
        assert (sample.prompt, sample.label) == (f"task {sample.index}", str(sample.index))
        assert sample.metadata["variant"] == sample.index
        assert sample.reward == 2.0 * sample.index


def test_metrics_say_what_was_dropped() -> None:
    """Under slime's own names."""
    launch = Launch(batch_size=4, n=2, reward=_zero_for_even_groups, filter_fn=check_reward_nonzero_std)
    output = generate_rollout_batch(launch.args(), 0, launch.source())
    assert output.metrics["rollout/dynamic_filter/drop_check_reward_nonzero_std"] >= 1
    assert output.metrics["rollouts/prompts/in_batch"] == 4


def _zero_for_even_groups(sample: Sample) -> float:
    assert sample.index is not None
    assert sample.group_index is not None
    return 0.0 if sample.group_index % 2 == 0 else float(sample.index % 2)


def test_the_log_has_a_sample_and_the_progress(caplog: pytest.LogCaptureFixture) -> None:
    """The first sample of each call with its label and reward, and a line for each quarter of the batch."""
    launch = Launch(batch_size=8, n=2, over_sampling_factor=1.0)
    with caplog.at_level(logging.INFO, logger="rollouts.integrations.slime"):
        generate_rollout_batch(launch.args(), 7, launch.source())
    lines = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(r"rollout 7: first sample: 'prompt \d+reply \d+/0', label: \d+, reward: \d\.0", lines[0])
    progress = [f"rollout 7: {count} of 8 groups accepted, 0 dropped, 0 failed" for count in (2, 4, 6, 8)]
    assert lines[1:] == progress


# -- between calls ----------------------------------------------------------------------------------------------------


def test_nothing_finished_is_thrown_away() -> None:
    """Over many calls every group of slime is in one batch or still carried; none is played twice."""
    launch = Launch(batch_size=4, n=2, over_sampling_factor=2.0)
    args, source = launch.args(), launch.source()
    seen: Counter[int] = Counter()
    for rollout_id in range(8):
        output = generate_rollout_batch(args, rollout_id, source)
        seen.update(group[0].group_index for group in output.samples)
    assert max(seen.values()) == 1
    assert len(source.given) <= 8 * 4 + 4
    assert max(launch.played.values()) == 2
    close_rollouts()
    assert {group[0].group_index for group in source.added} == set(source.given) - set(seen)


def test_finished_rollouts_survive_a_restart() -> None:
    """A returned group contains the tokens and rewards of its finished rollouts; only the others are played again."""
    scored: set[int] = set()
    both = anyio.Event()
    held = True

    async def play(prompt: Prompt) -> list[Sample]:
        assert prompt.group_index is not None
        assert prompt.index is not None
        if held and prompt.group_index >= 2 and prompt.index % 2 == 1:
            await anyio.sleep_forever()
        if held and prompt.index == 0:
            await both.wait()
        if prompt.metadata["row"] >= 4:  # beyond what was handed back: not to be sooner
            await anyio.sleep_forever()
        return [made_sample(prompt, reply=prompt.index + 1)]

    async def reward(sample: Sample) -> float:
        assert sample.index is not None
        scored.add(sample.index)
        if scored.issuperset({4, 6}):
            both.set()
        return float(sample.index % 2)

    launch = Launch(batch_size=2, n=2, play=play, reward=reward, over_sampling_factor=2.0)
    args, source = launch.args(), launch.source()
    generate_rollout_batch(args, 0, source)
    close_rollouts()
    before = {sample.index: sample.tokens for sample in leaves(source.added) if sample.reward is not None}
    assert set(before) == {4, 6}
    held = False
    scored.clear()
    output = generate_rollout_batch(args, 1, source)
    after = {sample.index: sample for sample in leaves(output.samples)}
    assert {index: after[index].tokens for index in before} == before
    assert {after[index].metadata["start_rollout_id"] for index in before} == {0}
    assert len(after) == 4
    close_rollouts()


def test_one_event_loop_lives_as_long_as_the_process() -> None:
    """Other flags and another data source are a new pipeline on the same loop."""
    loops: set[Any] = set()

    async def play(prompt: Prompt) -> list[Sample]:
        loops.add(asyncio.get_running_loop())
        return [made_sample(prompt)]

    launch = Launch(play=play)
    args, source = launch.args(), launch.source()
    generate_rollout_batch(args, 0, source)
    args.rollouts_max_attempts = 1
    generate_rollout_batch(args, 1, source)
    generate_rollout_batch(args, 2, launch.source())
    close_rollouts()
    generate_rollout_batch(args, 3, source)
    assert len(loops) == 1


def test_changed_flags_are_seen() -> None:
    """slime's own state keeps the first namespace forever; ours reads the namespace of each call."""
    launch = Launch(batch_size=2)
    args, source = launch.args(), launch.source()
    assert len(generate_rollout_batch(args, 0, source).samples) == 2
    args.rollout_batch_size = args.over_sampling_batch_size = 5
    assert len(generate_rollout_batch(args, 1, source).samples) == 5


# -- failures that slime has, and this has not ------------------------------------------------------------------------


def test_a_reward_that_raises_once_costs_that_sample() -> None:
    """Neither the call nor the next one fails; the group is complete, with one rollout played again."""
    launch = Launch(batch_size=3, n=2)
    raised: list[int] = []

    def reward(sample: Sample) -> float:
        assert sample.index is not None
        if sample.index == 3 and not raised:
            raised.append(sample.index)
            raise RuntimeError("the judge is away")
        return float(sample.index % 2)

    launch.reward = reward
    args, source = launch.args(), launch.source()
    first = generate_rollout_batch(args, 0, source)
    second = generate_rollout_batch(args, 1, source)
    assert raised == [3]
    assert sum(launch.played.values()) <= 1 + 2 * len(source.given)
    assert launch.played[1] == 3
    assert [len(output.samples) for output in (first, second)] == [3, 3]
    assert all(sample.reward is not None for output in (first, second) for sample in leaves(output.samples))


def test_a_reward_that_always_raises_costs_its_group_and_is_counted() -> None:
    """The group counts as failed under its error kind; other groups fill the batch."""

    def reward(sample: Sample) -> float:
        assert sample.index is not None
        if sample.group_index == 1:
            raise RuntimeError("never")
        return float(sample.index % 2)

    launch = Launch(batch_size=4, n=2, reward=reward, over_sampling_factor=1.0)
    output = generate_rollout_batch(launch.args(), 0, launch.source())
    assert [group[0].group_index for group in output.samples] == [0, 2, 3, 4]
    assert output.metrics.get("rollouts/failed_groups/RewardFailure", 1) == 1  # or it is being tried again


def test_an_error_ends_its_call_and_the_next_one_is_sound() -> None:
    """A filter that accepts nothing ends the call with its name; with another filter the same process works."""
    launch = Launch(batch_size=2, n=2, reward=lambda sample: 0.0, filter_fn=check_reward_nonzero_std)
    args, source = launch.args(), launch.source()
    with pytest.raises(FilterFailure, match="check_reward_nonzero_std accepted none"):
        generate_rollout_batch(args, 0, source)
    launch.reward = launch.score
    args.rollouts_max_attempts = 1  # another launch: the recipe is read again
    assert len(generate_rollout_batch(args, 0, source).samples) == 2


def test_an_aborted_rollout_never_reaches_training() -> None:
    """It is played again; after the last attempt its group fails; no sample leaves without a reward."""

    async def play(prompt: Prompt) -> list[Sample]:
        status = Status.ABORTED if prompt.group_index == 0 else Status.COMPLETED
        return [made_sample(prompt, status=status)]

    launch = Launch(batch_size=3, n=2, play=play)
    output = generate_rollout_batch(launch.args(), 0, launch.source())
    groups = {group[0].group_index for group in output.samples}
    assert len(groups) == 3
    assert 0 not in groups
    assert all(sample.reward is not None for sample in leaves(output.samples))
    assert output.metrics.get("rollouts/failed_groups/GenerateFailure", 1) == 1  # or it is being tried again


@pytest.mark.parametrize(
    "fields",
    [
        {"loss_mask": [0] * 13, "versions": []},
        {"rollout_log_probs": None},
        {"rollout_log_probs": [float("nan")] * 13},
        {"loss_mask": [1] * 13, "versions": []},
    ],
    ids=["nothing sampled", "no logprobs", "logprobs that are not numbers", "no prompt token"],
)
def test_what_slime_would_choke_on_costs_its_group_only(fields: dict[str, Any]) -> None:
    """Each would be a crash or a silent error in slime later."""

    async def play(prompt: Prompt) -> list[Sample]:
        return [made_sample(prompt, **(fields if prompt.group_index == 0 else {}))]

    launch = Launch(batch_size=2, n=2, play=play)
    output = generate_rollout_batch(launch.args(), 0, launch.source())
    assert 0 not in {group[0].group_index for group in output.samples}


def test_forks_come_as_a_third_level_with_one_rollout_id() -> None:
    """The nesting is the same throughout the batch, as slime's own check of fan-out requires."""

    async def play(prompt: Prompt) -> list[Sample]:
        return [made_sample(prompt, branch=branch) for branch in range(1 + (prompt.index or 0) % 3)]

    launch = Launch(batch_size=3, n=2, play=play, filter_fn=check_reward_nonzero_std)
    output = generate_rollout_batch(launch.args(), 0, launch.source())
    for group in output.samples:
        assert len(group) == 2
        for rollout in group:
            assert len({sample.rollout_id for sample in rollout}) == 1
    ids = [rollout[0].rollout_id for group in output.samples for rollout in group]
    assert len(set(ids)) == len(ids)


def test_groups_of_one_with_a_spread_filter_are_refused() -> None:
    """slime would drop every group silently and forever."""
    launch = Launch(n=1, filter_fn=None)
    args = launch.args(dynamic_sampling_filter_path="rollouts.integrations.slime.filters.check_reward_nonzero_std")
    with pytest.raises(ConfigError, match=r"n_samples_per_prompt.*at least 2"):
        generate_rollout_batch(args, 0, launch.source())


def test_a_data_source_that_runs_dry_says_so() -> None:
    """It does not wait forever; accepted groups stay for the next call."""
    launch = Launch(batch_size=4, n=2)
    source = launch.source(groups=3)
    args = launch.args()
    with pytest.raises(DataExhausted, match="3 of 4 groups are accepted"):
        generate_rollout_batch(args, 0, source)
    source.left = 1
    assert len(generate_rollout_batch(args, 1, source).samples) == 4


def test_one_process_serves_training_and_evaluation() -> None:
    """slime's own two cannot share a process under load; one loop serves both here."""
    launch = Launch(batch_size=2, n=2)
    args, source = launch.args(), launch.source()
    for rollout_id in range(2):
        assert len(generate_rollout_batch(args, rollout_id, source).samples) == 2
        with pytest.raises(ConfigError, match="eval_datasets"):
            generate_rollout_batch(args, rollout_id, source, evaluation=True)


# -- plug-ins of slime's own --------------------------------------------------------------------------------------


def hook(args: Any, sample: Any, *, rollout_id: int | None = None, evaluation: bool = False) -> Any:
    """A sample hook that extends the metadata, and removes samples of one row from the loss."""
    sample.metadata["hooked"] = (rollout_id, evaluation)
    sample.remove_sample = sample.metadata["row"] == 1
    return sample


def remove_last(args: Any, groups: list[list[Any]]) -> None:
    """A sample filter."""
    for group in groups:
        group[-1].remove_sample = True


def see_all(args: Any, groups: list[list[Any]], get_samples: Any) -> None:
    """An all-samples process."""
    args.seen.append(sorted(group[0].group_index for group in groups))


def drop_third(args: Any, samples: list[Any], **_: Any) -> Any:
    """A dynamic filter with its own reason."""
    keep = samples[0].metadata["row"] != 3 and samples[0].reward is not None
    return records().filter_output(keep=keep, reason=None if keep else "third")


async def parts(args: Any, sample: Any, **_: Any) -> Any:
    """A dict reward."""
    assert sample.tokens
    return {"score": float(sample.index % 2), "format": 0.5}


def test_slimes_hooks_filters_and_rewards_are_served() -> None:
    """This rollout function calls everything that slime's default one calls."""
    launch = Launch(batch_size=4, n=2, over_sampling_factor=1.0)
    args = launch.args(
        rollout_sample_hook_path=[f"{__name__}.hook"],
        rollout_sample_filter_path=f"{__name__}.remove_last",
        rollout_all_samples_process_path=f"{__name__}.see_all",
        dynamic_sampling_filter_path=f"{__name__}.drop_third",
        custom_rm_path=f"{__name__}.parts",
        reward_key="score",
        seen=[],
    )
    output = generate_rollout_batch(args, 7, launch.source())
    assert [group[0].group_index for group in output.samples] == [0, 1, 2, 4]
    assert args.seen == [[0, 1, 2, 3, 4]]
    assert output.metrics["rollout/dynamic_filter/drop_third"] == 1
    for group in output.samples:
        assert [sample.reward for sample in group] == [{"score": float(i), "format": 0.5} for i in range(2)]
        assert [sample.metadata["hooked"] for sample in group] == [(7, False)] * 2
        assert [sample.remove_sample for sample in group] == [group[0].group_index == 1, True]
