"""State between calls: none by default; partial rollouts of several turns, staleness, asynchronous rollouts."""

from __future__ import annotations

import time
from argparse import Namespace
from typing import Any
from urllib.request import Request, urlopen

import anyio
import msgspec
import pytest

from rollouts.dtypes import VersionSpan
from rollouts.engine import DEMO_MODEL
from rollouts.errors import ConfigError
from rollouts.integrations.slime import close_rollouts, generate_rollout_batch
from rollouts.integrations.slime.convert import leaves
from rollouts.integrations.slime.filters import pop_first
from rollouts.integrations.slime.records import records
from rollouts.training import Prompt, Sample, check_reward_nonzero_std
from tests.integrations.slime.launches import DEFAULT, Launch, Source, made_sample

# -- on the embedded engine -------------------------------------------------------------------------------------------


class Problems(Source):
    """Sums for the demo model."""

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        groups = super().get_samples(num_samples)
        for group in groups:
            for sample in group:
                if not sample.tokens:
                    a, b = 10 + sample.group_index % 80, 11 + sample.group_index % 70
                    sample.prompt, sample.label = f"What is ({a} + {b}) * 3?", str((a + b) * 3)
        return groups


def on(engine: str, **overrides: Any) -> Namespace:
    host, port = engine.removeprefix("http://").split(":")
    values = {
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 4,
        "over_sampling_batch_size": 2,
        "rollouts_over_sampling_factor": 5.0,
        "rollouts_carry_over": True,
        "rollout_temperature": 1.0,
        "rollout_max_response_len": 60,
        "hf_checkpoint": str(DEMO_MODEL),
        "sglang_router_ip": host,
        "sglang_router_port": int(port),
        "rollouts_recipe": "rollouts.integrations.slime.demo.recipe",
    }
    return Namespace(**{**values, **overrides})


def ask(engine: str, path: str, body: Any = None) -> Any:
    data = None if body is None else msgspec.json.encode(body)
    request = Request(engine + path, data=data, headers={"Content-Type": "application/json"})
    with urlopen(request, timeout=30) as answer:
        text = answer.read()
    return msgspec.json.decode(text) if text else None


def generated(engine: str) -> int:
    return int(ask(engine, "/server_info")["internal_states"][0]["generated_tokens"])


def test_nothing_is_sampled_between_calls_and_episodes_go_on(engine: str) -> None:
    """Agents of several turns pause in the middle and finish in the next call, under its version."""
    args, source = on(engine), Problems(4)
    resumed = 0
    mixed: list[Any] = []
    try:
        for rollout_id in range(6):
            ask(engine, "/update_weight_version", {"new_version": f"w{rollout_id}", "abort_all_requests": False})
            output = generate_rollout_batch(args, rollout_id, source)
            before = generated(engine)
            time.sleep(0.2)
            assert generated(engine) == before
            resumed += output.metrics["rollouts/resumed"]
            samples = list(leaves(output.samples))
            mixed += [sample for sample in samples if len(set(sample.weight_versions)) > 1]
            for sample in samples:
                assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length
                assert sample.session_id
    finally:
        close_rollouts()
        ask(engine, "/update_weight_version", {"new_version": "default", "abort_all_requests": False})
    assert resumed >= 1
    assert mixed
    assert len(source.given) <= 6 * 2 + 8


def test_fully_asynchronous_rollouts_go_on_between_calls(engine: str) -> None:
    """Tokens are generated between calls; a call returns finished groups, with the usual filter and metrics."""
    args, source = on(engine, rollouts_fully_async=True), Problems(4)
    try:
        generate_rollout_batch(args, 0, source)
        before = generated(engine)
        deadline = time.monotonic() + 20
        while generated(engine) == before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert generated(engine) > before
        output = generate_rollout_batch(args, 1, source)
        assert "rollouts/groups_carried" in output.metrics
        assert [len(group) for group in output.samples] == [4, 4]
    finally:
        close_rollouts()


def test_a_launch_needs_no_recipe(engine: str) -> None:
    """One reply to each prompt, text sent as slime rendered it, scored by the launch's own reward function."""
    flags = {"rollouts_recipe": None, "custom_rm_path": f"{__name__}.length", "rollout_max_response_len": 12}
    args, source = on(engine, **flags), Problems(4)
    output = generate_rollout_batch(args, 0, source)
    for sample in leaves(output.samples):
        assert 1 <= sample.response_length <= 12
        assert set(sample.loss_mask) == {1}
        assert sample.reward == float(sample.response_length)


async def length(args: Any, sample: Any, **_: Any) -> float:
    """A reward of slime's shape."""
    return float(sample.response_length)


# -- how old tokens may be ---------------------------------------------------------------------------------------------


class Trained(Launch):
    """A launch whose rollouts use the weights of the call, which change after each call."""

    version = 0
    begun = 0

    async def made(self, prompt: Prompt) -> list[Sample]:
        self.begun += 1
        version = str(self.version)
        for _ in range((prompt.index or 0) * 7 % 23):
            await anyio.lowlevel.checkpoint()
        return [made_sample(prompt, version=version)]

    def batches(self, args: Namespace, count: int) -> list[Any]:
        """Make several calls; return the ages of the tokens and the groups of each."""
        self.play = self.made
        source = self.source()
        found = []
        self.metadata: list[dict[str, Any]] = []
        for rollout_id in range(count):
            self.version = rollout_id
            output = generate_rollout_batch(args, rollout_id, source)
            samples = list(leaves(output.samples))
            ages = {rollout_id - int(name) for sample in samples for name in sample.weight_versions}
            self.metadata += [sample.metadata for sample in samples]
            found.append((ages, [group[0].group_index for group in output.samples], output.metrics))
        self.given = source.given
        return found


def test_a_default_launch_is_on_policy() -> None:
    """No token of older weights, no extra rollout, nothing carried, for any over-sampling factor of the recipe."""
    launch = Trained(batch_size=4, n=2, over_sampling_factor=2.0)
    found = launch.batches(launch.args(**DEFAULT), 5)
    assert [ages for ages, *_ in found] == [{0}] * 5
    assert [groups for _, groups, _ in found] == [list(range(4 * n, 4 * n + 4)) for n in range(5)]
    assert launch.begun == 5 * 4 * 2
    assert {metrics["rollouts/groups_carried"] for *_, metrics in found} == {0}


def test_a_filter_costs_one_group_for_one() -> None:
    """A dropped group is replaced, and the batch stays on-policy."""
    launch = Trained(batch_size=4, n=2, reward=_zero_for_even_groups, filter_fn=check_reward_nonzero_std)
    found = launch.batches(launch.args(**DEFAULT | {"rollouts_recipe_filter": True}), 4)
    assert [ages for ages, *_ in found] == [{0}] * 4
    assert launch.begun <= 2 * (2 * 16 + 1)
    assert len(launch.given) - launch.begun // 2 < 4  # groups of the last request that have not begun


def _zero_for_even_groups(sample: Sample) -> float:
    assert sample.index is not None
    assert sample.group_index is not None
    return 0.0 if sample.group_index % 2 == 0 else float(sample.index % 2)


def test_over_sampling_is_as_slimes_flag_says_and_stays_on_policy() -> None:
    """Leftovers of a batch are cancelled; their prompts come out again: none is lost, and none comes twice."""
    launch = Trained(batch_size=4, n=2)
    found = launch.batches(launch.args(**DEFAULT, over_sampling_batch_size=8), 6)
    assert [ages for ages, *_ in found] == [{0}] * 6
    used = [index for _, groups, _ in found for index in groups]
    assert len(set(used)) == len(used) == 24
    assert {metrics["rollouts/groups_carried"] for *_, metrics in found} == {0}
    assert sum(metrics["rollouts/groups_begun_again"] for *_, metrics in found) > 0
    assert len(launch.given) <= 24 + 8
    assert not any("start_rollout_id" in metadata for metadata in launch.metadata)


def test_finished_rollouts_of_a_cut_batch_are_not_handed_on() -> None:
    """Nor are they returned to the data source: the next call has other weights."""
    launch = Trained(batch_size=2, n=2)
    launch.play = launch.made
    args, source = launch.args(**DEFAULT, over_sampling_batch_size=6), launch.source()
    generate_rollout_batch(args, 0, source)
    close_rollouts()
    assert source.added
    assert all(sample.reward is None and not sample.tokens for sample in leaves(source.added))


@pytest.mark.parametrize(
    "flags",
    [{"partial_rollout": True}, {"rollouts_carry_over": True}],
    ids=["slime's partial rollouts", "our key"],
)
def test_one_flag_carries_over(flags: dict[str, Any]) -> None:
    """Leftovers of a batch serve the next one, and name the call in which they started."""
    launch = Trained(batch_size=4, n=2)
    args = launch.args(**{**DEFAULT, "over_sampling_batch_size": 8, **flags})
    found = launch.batches(args, 6)
    assert any(age > 0 for ages, *_ in found for age in ages)
    assert sum(metrics["rollouts/groups_carried"] for *_, metrics in found) > 0
    assert max(launch.played.values()) == 2  # nothing is played twice


def test_what_was_carried_says_where_it_began() -> None:
    """slime sets ``start_rollout_id`` on the samples of a resumed partial rollout."""
    launch = Trained(batch_size=4, n=2)
    launch.play = launch.made
    args = launch.args(**DEFAULT, over_sampling_batch_size=8, partial_rollout=True)
    source = launch.source()
    for rollout_id in range(4):
        launch.version = rollout_id
        for sample in leaves(generate_rollout_batch(args, rollout_id, source).samples):
            begun = sample.metadata.get("start_rollout_id")
            assert begun is None or begun < rollout_id
            assert begun is not None or sample.weight_versions == [str(rollout_id)] * 2


# -- the buffer filter ------------------------------------------------------------------------------------------------


class Unequal(Launch):
    """A launch whose rollouts finish in the order of their groups; those of some groups never do by themselves."""

    slow: frozenset[int] = frozenset()

    async def made(self, prompt: Prompt) -> list[Sample]:
        assert prompt.group_index is not None
        begins_again = str(prompt.prompt).startswith("changed")
        if prompt.group_index in self.slow and (prompt.index or 0) % 2 and not begins_again:
            await anyio.sleep_forever()
        return [made_sample(prompt)]


def filtered(filter_name: str, slow: frozenset[int], calls: int) -> tuple[Unequal, Source, Namespace, list[list[Any]]]:
    """Make calls with a buffer filter; return the groups of each batch, too."""
    launch = Unequal(batch_size=2, n=2)
    launch.play, launch.slow = launch.made, slow
    flags = {"over_sampling_batch_size": 4, "partial_rollout": True, "buffer_filter_path": f"{__name__}.{filter_name}"}
    args, source = launch.args(**DEFAULT | flags, seen=[]), launch.source()
    batches = []
    for rollout_id in range(calls):
        output = generate_rollout_batch(args, rollout_id, source)
        batches.append(output.samples)
    return launch, source, args, batches


def sees(args: Namespace, rollout_id: Any, buffer: list[list[Any]], num_samples: int) -> list[list[Any]]:
    """Take every group, and note the call."""
    seen = [
        (group[0].group_index, [(s.status.value, s.reward, s.metadata["start_rollout_id"]) for s in group])
        for group in buffer
    ]
    args.seen.append((rollout_id, num_samples, sorted(seen)))
    return pop_first(args, rollout_id, buffer, num_samples)


def test_the_buffer_filter_gets_what_a_call_left_over() -> None:
    """With slime's arguments, at each call with waiting groups; what it takes continues where it stopped."""
    launch, _, args, batches = filtered("sees", frozenset({0, 1}), 2)
    assert [group[0].group_index for group in batches[0]] == [2, 3]
    half = [("completed", 0.0, 0), ("aborted", None, 0)]
    assert args.seen == [(None, 4, [(0, half), (1, half)])]
    assert [launch.played[number] for number in (0, 1)] == [2, 2]  # no rollout began again


def drops(args: Namespace, rollout_id: Any, buffer: list[list[Any]], num_samples: int) -> list[list[Any]]:
    """Empty the buffer, and take nothing."""
    args.seen += [group[0].group_index for group in buffer]
    buffer.clear()
    return []


def test_a_group_that_the_buffer_filter_removed_is_gone() -> None:
    """It is in no later batch, is not played again, and does not return to the data source."""
    launch, source, args, batches = filtered("drops", frozenset({0, 1}), 3)
    assert args.seen[:2] == [0, 1]
    assert not {0, 1} & {sample.group_index for sample in leaves(batches)}
    assert [launch.played[number] for number in (0, 1)] == [2, 2]
    close_rollouts()
    assert not {0, 1} & {group[0].group_index for group in source.added}


def keeps_back(args: Namespace, rollout_id: Any, buffer: list[list[Any]], num_samples: int) -> list[list[Any]]:
    """Take the group with the highest number, and leave the others."""
    args.seen.append([group[0].group_index for group in buffer])
    return [buffer.pop(max(range(len(buffer)), key=lambda at: buffer[at][0].group_index))]


def test_a_group_that_the_buffer_filter_leaves_waits() -> None:
    """It is offered again in the next call, keeps its finished rollouts, and returns to the data source at the end."""
    _, source, args, _ = filtered("keeps_back", frozenset({0}), 3)
    assert [0 in seen for seen in args.seen] == [True, True]
    close_rollouts()
    (left,) = [group for group in source.added if group[0].group_index == 0]
    assert [sample.reward for sample in left] == [0.0, None]


def test_a_returned_group_says_in_which_call_it_began() -> None:
    """The finished rollout of a group that is unfinished at the end has the number of that call."""
    launch = Unequal(batch_size=2, n=2)
    launch.play, launch.slow = launch.made, frozenset({5})
    args, source = launch.args(**DEFAULT, over_sampling_batch_size=4, partial_rollout=True), launch.source()
    for rollout_id in range(4):
        generate_rollout_batch(args, rollout_id, source)
        if 5 in launch.played:
            break
    assert rollout_id > 0
    close_rollouts()
    (left,) = [group for group in source.added if group[0].group_index == 5]
    assert [sample.reward for sample in left] == [0.0, None]
    assert left[0].metadata["start_rollout_id"] == rollout_id


def renames(args: Namespace, rollout_id: Any, buffer: list[list[Any]], num_samples: int) -> list[list[Any]]:
    """Give every unfinished rollout another prompt, the same in each call: a group may be left over by several."""
    for group in buffer:
        group[1].prompt = f"changed prompt {group[0].group_index}"
    return pop_first(args, rollout_id, buffer, num_samples)


def test_what_the_buffer_filter_writes_is_played() -> None:
    """A changed sample is what its rollout begins with; its finished sibling is kept."""
    _, _, _, batches = filtered("renames", frozenset({0, 1}), 3)
    (group,) = [group for batch in batches for group in batch if group[0].group_index == 0]
    assert [sample.prompt for sample in group] == ["prompt 0", "changed prompt 0"]
    assert [sample.metadata["start_rollout_id"] for sample in group] == [0, 0]


def test_a_buffer_filter_is_refused_where_no_group_waits() -> None:
    """Fully asynchronous groups never stop between two calls."""
    launch = Launch()
    args = launch.args(rollouts_fully_async=True, buffer_filter_path=f"{__name__}.sees")
    with pytest.raises(ConfigError, match=r"args\.buffer_filter_path: .* expected none with rollouts_fully_async"):
        generate_rollout_batch(args, 0, launch.source())


# -- staleness --------------------------------------------------------------------------------------------------------


def _versioned(launch: Launch, version: list[str]) -> None:
    async def play(prompt: Prompt) -> list[Sample]:
        return [made_sample(prompt, version=version[0])]

    launch.play = play


def test_surplus_serves_the_next_call_within_its_bound(engine: str) -> None:
    """A group one version old is used; a group two versions old is played again, and nothing is lost."""
    launch = Launch(batch_size=2, n=2, over_sampling_factor=3.0)
    version = ["1"]
    _versioned(launch, version)
    at = {name: getattr(on(engine), name) for name in ("sglang_router_ip", "sglang_router_port")}
    args, source = launch.args(rollouts_max_staleness=1, **at), launch.source()
    used: list[tuple[int, str]] = []
    stale = 0
    for rollout_id in range(8):
        version[0] = str(1 + rollout_id)
        ask(engine, "/update_weight_version", {"new_version": version[0], "abort_all_requests": False})
        output = generate_rollout_batch(args, rollout_id, source)
        for group in output.samples:
            (trained,) = {name for sample in group for name in sample.weight_versions}
            used.append((group[0].group_index, trained))
            assert int(version[0]) - int(trained) <= 1
        stale += output.metrics.get("rollout/dynamic_filter/drop_stale", 0)
        time.sleep(0.05)
    assert stale >= 1
    assert len({index for index, _ in used}) == len(used) == 16
    close_rollouts()
    assert {group[0].group_index for group in source.added} == set(source.given) - {index for index, _ in used}


def test_a_prompt_that_is_always_stale_is_given_up() -> None:
    """After three replays; it is counted, done at the data source, and the other prompts fill the batches."""
    launch = Launch(batch_size=2, n=2, over_sampling_factor=2.0)

    async def play(prompt: Prompt) -> list[Sample]:
        played.append(str(prompt.prompt))
        return [made_sample(prompt, version="0" if prompt.prompt == "prompt 9" else "1")]

    played: list[str] = []
    launch.play = play
    args, source = launch.args(rollouts_max_staleness=0), launch.source()
    outputs = [generate_rollout_batch(args, rollout_id, source) for rollout_id in range(16)]
    assert played.count("prompt 9") == 4 * launch.n
    assert outputs[-1].metrics["rollouts/stale_prompts_given_up"] == 1
    assert all(group[0].label != "9" for output in outputs for group in output.samples)
    close_rollouts()
    assert all(group[0].label != "9" for group in source.added)


@pytest.mark.parametrize("carry_over", [True, False])
def test_at_most_in_flight_rollouts_are_played(carry_over: bool) -> None:
    """With and without leftovers; the batches are whole."""
    launch = Launch(batch_size=2, n=3, over_sampling_factor=3.0)
    alive = [0, 0]

    async def play(prompt: Prompt) -> list[Sample]:
        alive[0] += 1
        alive[1] = max(alive)
        try:
            await anyio.sleep(0.001 * (1 + (prompt.index or 0) % 5))
        finally:
            alive[0] -= 1
        return [made_sample(prompt)]

    launch.play = play
    args, source = launch.args(rollouts_in_flight=4, rollouts_carry_over=carry_over), launch.source()
    for rollout_id in range(4):
        output = generate_rollout_batch(args, rollout_id, source)
        assert [len(group) for group in output.samples] == [3, 3]
        assert 0 <= output.metrics["rollouts/slots/running"] <= 4
    assert alive[1] == 4


def test_masked_tokens_are_not_stale() -> None:
    """If earlier versions are masked, only the trained tokens of a group count."""
    launch = Launch(batch_size=1, n=2, over_sampling_factor=1.0)

    async def play(prompt: Prompt) -> list[Sample]:
        spans = [VersionSpan("1", 3, 7), VersionSpan("9", 9, 13)]
        return [made_sample(prompt, versions=spans)]

    launch.play = play
    args = launch.args(rollouts_max_staleness=0, mask_offpolicy_in_partial_rollout=True)
    output = generate_rollout_batch(args, 0, launch.source())
    assert [sample.loss_mask for sample in leaves(output.samples)] == [[0] * 6 + [1] * 4] * 2


@pytest.mark.parametrize("flag", ["rollout_top_p", "use_rollout_routing_replay"])
def test_a_recipe_without_a_policy_replays_nothing(flag: str) -> None:
    """Its own requests return no columns for the trainer; the error names the flag."""
    launch = Launch()
    flags = {flag: 0.9, "num_layers": 2, "moe_router_topk": 1}
    with pytest.raises(ConfigError, match=rf"args\.{flag}: .* expected a generate_fn that takes a policy"):
        generate_rollout_batch(launch.args(**flags), 0, launch.source())


def test_records_are_those_of_the_process() -> None:
    """slime's where it is importable, else the stand-ins; the same for all."""
    assert records() is records()
