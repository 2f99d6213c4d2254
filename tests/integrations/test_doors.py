"""Every door to a trainer: a sample keeps its own reward, and was sampled at the trainer's temperature."""

from __future__ import annotations

import itertools
import tempfile
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import msgspec
import pytest

from rollouts.commands import main
from rollouts.errors import ConfigError
from rollouts.integrations import areal, nemo_rl, openrlhf, prime_rl, rllm, skyrl, tinker, trl
from rollouts.integrations.exports import EXPORTERS, export_batches
from rollouts.integrations.slime import normalise_rewards
from rollouts.integrations.slime.convert import check_trainable, to_slime
from rollouts.integrations.slime.debug_data import export_run, write_debug_data
from rollouts.integrations.verl.rows import to_outputs
from rollouts.runs.writer import RunWriter
from rollouts.training import RolloutConfig, Sample
from rollouts.training.batch import collate, collate_packed, group_advantages
from rollouts.training.comparisons import COMPARISON, by_comparison, comparison_name
from rollouts.training.rows import by_conversation, by_rollout
from tests.trainer_samples import proposed, scored_groups, two_seats

Door = Callable[..., list[float]]
"""The rewards of the rows that a door makes of samples, in their order."""


def unlike() -> list[Sample]:
    """A group of two rollouts of two branches each, whose rewards are 1 and -1."""
    rollouts = [branches for branches in by_rollout(scored_groups(1, 4, forks=True)) if len(branches) > 1]
    for branches in rollouts:
        for branch, reward in zip(branches, (1.0, -1.0), strict=True):
            branch.reward = reward
    return [*itertools.chain(*rollouts)]


def of_advantages(samples: Sequence[Sample]) -> list[float]:
    return list(group_advantages(samples).tolist())


def of_slime(samples: Sequence[Sample]) -> list[float]:
    return [to_slime(sample).reward for sample in samples]


def of_slime_centred(samples: Sequence[Sample]) -> list[float]:
    args = Namespace(advantage_estimator="grpo", grpo_std_normalization=False, reward_key=None)
    return normalise_rewards(args, [to_slime(sample) for sample in samples])[1]


def of_slime_scaled(samples: Sequence[Sample]) -> list[float]:
    args = Namespace(advantage_estimator="grpo", reward_key=None)
    return normalise_rewards(args, [to_slime(sample) for sample in samples])[1]


def check_trainable_of_slime(samples: Sequence[Sample]) -> list[float]:
    for sample in samples:
        check_trainable(sample)
    return []


def of_skyrl(samples: Sequence[Sample], **options: Any) -> list[float]:
    ids = [*range(len(by_rollout(samples)))]
    return list(skyrl.to_generator_output(samples, step_wise=True, trajectory_ids=ids, **options)["rewards"])


def of_tinker(samples: Sequence[Sample]) -> list[float]:
    rows = [tinker.datum_columns(sample, sample.reward or 0.0) for sample in samples]
    return [float(row["advantages"][row["mask"] > 0][0]) for row in rows]


def of_tinker_cookbook(samples: Sequence[Sample]) -> list[float]:
    return list(tinker.to_trajectory_group(samples).final_rewards_G)


def of_verl(samples: Sequence[Sample], **options: Any) -> list[float]:
    return [one.reward_score for branches in by_rollout(samples) for one in to_outputs(branches, **options)]


def of_areal(samples: Sequence[Sample], **options: Any) -> list[float]:
    return list(areal.to_tensors(samples, **options)["rewards"].tolist())


def of_prime_rl(samples: Sequence[Sample]) -> list[float]:
    rows = [prime_rl.training_columns(sample, sample.reward or 0.0, env_name="sums") for sample in samples]
    return [row["advantages"][row["mask"].index(True)] for row in rows]


def of_nemo(samples: Sequence[Sample], **options: Any) -> list[float]:
    pytest.importorskip("torch")
    return list(nemo_rl.to_batch(samples, **options)["total_reward"].tolist())


def of_openrlhf(samples: Sequence[Sample], **options: Any) -> list[float]:
    return [openrlhf.to_response(sample, **options)["reward"] for sample in samples]


def of_rllm(samples: Sequence[Sample], **options: Any) -> list[float]:
    return [one.trajectories[0].reward for one in rllm.to_episodes(samples, **options)]


def of_trl(samples: Sequence[Sample], **options: Any) -> list[float]:
    return [trl.to_row(sample, 0.0, **options).metrics["reward"] for sample in samples]


async def generate(prompts: Any) -> list[Sample]:
    return []


def of_trl_rollout_func(samples: Sequence[Sample], temperature: float = 1.0) -> list[float]:
    made = trl.RolloutFunc(RolloutConfig(batch_size=1, generate_fn=generate), [])
    return [made._row(sample, temperature)["env_reward"] for sample in samples]


def of_debug_data(samples: Sequence[Sample], **options: Any) -> list[float]:
    torch = pytest.importorskip("torch")
    with tempfile.TemporaryDirectory() as folder:
        file = write_debug_data(samples, Path(folder) / "0.pt", **options)
        return [row["reward"] for row in torch.load(file)["samples"]]


OWN_REWARD = [
    of_slime, of_slime_centred, of_debug_data, of_tinker, of_prime_rl, of_openrlhf, of_trl, of_trl_rollout_func,
    pytest.param(of_areal, marks=pytest.mark.trainer),
]  # fmt: skip
SHARED_REWARD = [of_advantages, of_slime_scaled, of_skyrl, of_tinker_cookbook, of_verl, of_rllm, of_nemo]
ONE_TEMPERATURE = [
    of_debug_data, of_skyrl, of_tinker, of_tinker_cookbook, of_verl, of_areal, of_nemo, of_openrlhf, of_rllm, of_trl,
    of_trl_rollout_func,
]  # fmt: skip


@pytest.mark.parametrize("door", OWN_REWARD)
def test_a_row_has_the_reward_of_its_sample(door: Door) -> None:
    """Also where samples of one rollout have unlike rewards: the players of a zero-sum game."""
    if door is of_areal:
        pytest.importorskip("areal")
    assert door(unlike()) == [1.0, -1.0, 1.0, -1.0]


@pytest.mark.parametrize("door", SHARED_REWARD)
def test_unlike_rewards_are_refused_where_a_rollout_has_one(door: Door) -> None:
    """By name; before, rows had the reward of the last branch, or a deviation that was not of the rewards."""
    with pytest.raises(ConfigError, match=r"samples of one rollout with unlike rewards|takes no forks"):
        door(unlike())


@pytest.mark.parametrize("door", ONE_TEMPERATURE)
def test_a_sample_of_another_temperature_is_refused(door: Door) -> None:
    """Its logprobs are of another distribution than the trainer's."""
    with pytest.raises(ConfigError, match=r"completions\[0\]\.temperature: got 0\.7; expected 1, by which .* divides"):
        door(scored_groups(1, 2, temperature=0.7))


@pytest.mark.parametrize("door", [of_debug_data, of_skyrl, of_nemo, of_openrlhf, of_trl, of_trl_rollout_func])
def test_the_temperature_of_the_trainer_is_named(door: Door) -> None:
    """A sample of that temperature is a row; one of another is not."""
    samples = scored_groups(1, 2, temperature=0.7)
    assert door(samples, temperature=0.7) == [sample.reward for sample in samples]
    with pytest.raises(ConfigError, match=r"got 0\.7; expected 0\.5, by which"):
        door(samples, temperature=0.5)


def test_a_record_without_a_temperature_is_not_compared() -> None:
    """As in runs of earlier versions."""
    (sample,) = scored_groups(1, 1, temperature=0.7)
    sample = attrs.evolve(sample, completions=[attrs.evolve(one, temperature=None) for one in sample.completions])
    assert of_trl([sample]) == [sample.reward]


def stored(path: Path) -> Path:
    writer = RunWriter(path, {"recipe": "test"})
    writer.write_batch(scored_groups(1, 2, temperature=0.7), {})
    writer.finish("finished")
    return path


@pytest.mark.parametrize("trainer", ["skyrl", "openrlhf", "nemo", "slime"])
def test_an_export_names_the_temperature_of_the_trainer(
    trainer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--temperature``; without it a run that was sampled at another than 1 is refused, and says how to name it."""
    if trainer in ("nemo", "slime"):
        pytest.importorskip("torch")
    run = stored(tmp_path / "run")
    command = ["export", str(run), "--to", trainer, str(tmp_path / "out")]
    assert main(command) == 2
    assert "got 0.7; expected 1" in (refusal := capsys.readouterr().err)
    assert "--temperature of rollouts export" in refusal
    assert not (tmp_path / "out").exists()
    assert main([*command, "--temperature", "0.7"]) == 0


@pytest.mark.parametrize("name", [name for name, one in EXPORTERS.items() if one.no_temperature])
def test_a_trainer_without_a_temperature_is_named_none(name: str, tmp_path: Path) -> None:
    """prime-rl has that of each token, tinker has none."""
    with pytest.raises(ConfigError, match=f"temperature: got 0.7; expected none with --to {name}"):
        export_batches(stored(tmp_path / "run"), tmp_path / "out", name, temperature=0.7)


@pytest.mark.parametrize(
    ("name", "value"), [("loss_multiplier", 0.5), ("advantages", 1.0), ("teacher_log_probs", -1.0)]
)
@pytest.mark.parametrize("door", [of_trl, of_trl_rollout_func])
def test_a_field_that_trl_lacks_is_refused(door: Door, name: str, value: float) -> None:
    """By both of its hooks: it would be lost."""
    (sample,) = scored_groups(1, 1)
    setattr(sample, name, value if name == "loss_multiplier" else [value if one else 0.0 for one in sample.loss_mask])
    with pytest.raises(ConfigError, match=f"{name}: got .*TRL has no field for it"):
        door([sample])


# -- text of a chat API -----------------------------------------------------------------------------------------------


def text_sample() -> Sample:
    """A scored rollout of a chat API: messages, and no token."""
    source = {"provider": "openai", "url": "https://api.example/v1", "model": "large"}
    return Sample(
        prompt="question", messages=[{"role": "assistant", "content": "reply"}], reward=1.0, group_index=0, index=0,
        rollout_id=0, status="completed", metadata={"chat_api": source},
    )  # fmt: skip


def of_tensors(samples: Sequence[Sample]) -> list[float]:
    pytest.importorskip("torch")
    return list(collate(samples).rewards.tolist())


def of_packed_tensors(samples: Sequence[Sample]) -> list[float]:
    pytest.importorskip("torch")
    return list(map(float, collate_packed(samples).tokens.tolist()))


def of_prime_rl_samples(samples: Sequence[Sample]) -> list[float]:
    return [len(prime_rl.to_training_samples(samples, env_name="sums"))]


def of_files(name: str) -> Door:
    """The exporter of this name, on a stored run."""

    def door(samples: Sequence[Sample]) -> list[float]:
        with tempfile.TemporaryDirectory() as folder:
            writer = RunWriter(Path(folder) / "run", {"recipe": "test"})
            writer.write_batch(list(samples), {})
            writer.finish("finished")
            if name == "slime":
                export_run(Path(folder) / "run", Path(folder) / "out")
            else:
                export_batches(Path(folder) / "run", Path(folder) / "out", name)
        return []

    door.__name__ = f"of_files_of_{name}"
    return door


DOORS = [
    of_advantages, of_tensors, of_packed_tensors, of_slime, of_slime_centred, of_slime_scaled, of_debug_data, of_skyrl,
    of_tinker, of_tinker_cookbook, of_verl, of_areal, of_prime_rl, of_nemo, of_openrlhf, of_rllm, of_trl,
    of_trl_rollout_func, check_trainable_of_slime, of_prime_rl_samples, *map(of_files, ["slime", *EXPORTERS]),
]  # fmt: skip


@pytest.mark.parametrize("door", DOORS)
def test_the_text_of_a_chat_api_is_refused_by_name(door: Door) -> None:
    """By every door, with what a batch needs: it has no token ids, and none are made up for it."""
    with pytest.raises(
        ConfigError, match=r"text of large at https://api\.example/v1.* with logprobs; this API has none"
    ):
        door([text_sample()])


# -- several seats ----------------------------------------------------------------------------------------------------


def of_seats_in_cookbook(samples: Sequence[Sample]) -> list[float]:
    pytest.importorskip("tinker_cookbook.rl.types")
    return [one for group in tinker.to_trajectory_groups(samples) for one in group.final_rewards_G]


def of_seats_in_verl(samples: Sequence[Sample]) -> list[float]:
    pytest.importorskip("verl.experimental.agent_loop.agent_loop")
    return [one.reward_score for branches in by_conversation(samples) for one in to_outputs(branches)]


def of_seats_in_rllm(samples: Sequence[Sample]) -> list[float]:
    pytest.importorskip("rllm.types")
    return [trajectory.reward for one in rllm.to_episodes(samples) for trajectory in one.trajectories]


def of_seats_in_skyrl(samples: Sequence[Sample]) -> list[float]:
    ids = [*range(len(by_conversation(samples)))]
    return list(skyrl.to_generator_output(samples, trajectory_ids=ids)["rewards"])


def of_seats_in_areal(samples: Sequence[Sample]) -> list[float]:
    pytest.importorskip("areal.utils.data")
    return of_areal(samples)


def with_one_opening(samples: Sequence[Sample]) -> list[Sample]:
    """The tokens of the first sample of each seat in place of those of the others."""
    first = {sample.seat: sample for sample in reversed(samples)}
    fields = ("reward", "index", "rollout_id")
    return [attrs.evolve(first[one.seat], **{name: getattr(one, name) for name in fields}) for one in samples]


def of_seats_in_nemo(samples: Sequence[Sample]) -> list[float]:
    return of_nemo(with_one_opening(samples))


SEATS = [
    of_slime, of_debug_data, of_tinker, of_prime_rl, of_openrlhf, of_trl, of_trl_rollout_func, of_seats_in_skyrl,
    of_seats_in_nemo,
    *(pytest.param(door, marks=pytest.mark.trainer)
      for door in (of_seats_in_cookbook, of_seats_in_verl, of_seats_in_rllm, of_seats_in_areal)),
]  # fmt: skip


@pytest.mark.parametrize("door", SEATS)
def test_the_rewards_of_two_seats_survive(door: Door) -> None:
    """Each row has the reward of its seat, of whichever sign; before, both had that of the last sample."""
    samples = two_seats()
    assert sorted(door(samples)) == sorted(sample.reward or 0.0 for sample in samples)


def test_seats_are_compared_with_themselves_by_each_estimator() -> None:
    """Within a seat the advantages add up to 0, and none is larger than that of its three rewards can be."""
    samples = two_seats()
    for values in (of_advantages(samples), of_slime_scaled(samples), of_slime_centred(samples)):
        for seat in ("player0", "player1"):
            own = [value for value, sample in zip(values, samples, strict=True) if sample.seat == seat]
            assert sum(own) == pytest.approx(0, abs=1e-5)
            assert max(map(abs, own)) <= 2 / 3**0.5 + 1e-6 or values == of_slime_centred(samples)
        assert any(values)


def test_a_skyrl_row_names_its_seat() -> None:
    """SkyRL compares the rewards of one ``instance_id``: it has the seat; ids for rollouts only are refused."""
    samples = two_seats()
    file = Path(tempfile.mkdtemp()) / "batch.json"
    skyrl.write_batch(samples, file)
    names = [one["instance_id"] for one in msgspec.json.decode(file.read_bytes())["trajectory_ids"]]
    assert names == ["0/player0", "0/player1"] * 3
    with pytest.raises(ConfigError, match="trajectory_ids: got '3 ids'; expected 6, one for each conversation"):
        skyrl.to_generator_output(samples, trajectory_ids=[0, 1, 2])


def test_the_cookbook_gets_one_group_for_each_seat() -> None:
    """One ``TrajectoryGroup`` would centre the rewards of both together."""
    with pytest.raises(ConfigError, match=r"0/player0.*0/player1.*; expected .* to_trajectory_groups"):
        tinker.to_trajectory_group(two_seats())


def test_nemo_refuses_seats_whose_prompts_do_not_tell_them_apart() -> None:
    """It compares the rewards of rows with equal prompt ids: one prompt of two seats, or two of one, are refused."""
    pytest.importorskip("torch")
    samples = with_one_opening(two_seats())
    samples[1] = attrs.evolve(samples[0], seat="player1", reward=-1.0)
    with pytest.raises(ConfigError, match=r"its prompt ids: got 'the same'; expected another than that of 0/player0"):
        nemo_rl.to_batch(samples)
    samples = two_seats()
    samples[2].tokens = [999, *samples[2].token_column[1:].tolist()]
    with pytest.raises(ConfigError, match=r"its prompt ids: got 'others'; expected those of .*player0"):
        nemo_rl.to_batch(samples)


def test_openrlhf_rows_of_a_seat_are_next_to_each_other(tmp_path: Path) -> None:
    """It compares rows by their position."""
    openrlhf.write_batch(two_seats(), tmp_path / "rows.jsonl")
    rows = [msgspec.json.decode(line) for line in (tmp_path / "rows.jsonl").read_bytes().splitlines()]
    assert [row["reward"] for row in rows] == [1.0, -1.0, 2.0, -1.0, 1.0, -2.0]


# -- rewards that are compared within a rollout -----------------------------------------------------------------------


def numbers(samples: Sequence[Sample], rows: Sequence[Sequence[Sample]]) -> list[list[int]]:
    """The rows that are compared with each other, as numbers of samples."""
    places = {id(sample): number for number, sample in enumerate(samples)}
    return [[places[id(sample)] for sample in members] for members in rows]


def named(names: Sequence[Any]) -> list[list[int]]:
    """The rows of equal names, as numbers of samples."""
    return [[at for at, one in enumerate(names) if one == name] for name in dict.fromkeys(names)]


COMPARED = [[0, 4], [1, 2, 3], [5, 6, 7]]
"""Proposers with each other, solvers with those of their rollout."""


def by_name(samples: Sequence[Sample]) -> list[list[int]]:
    """As verl's ``DataProto`` has it in ``uid``."""
    return named([comparison_name(sample) for sample in samples])


def by_instance(samples: Sequence[Sample]) -> list[list[int]]:
    """SkyRL's ``instance_id``."""
    with tempfile.TemporaryDirectory() as folder:
        skyrl.write_batch(samples, file := Path(folder) / "batch.json")
        return named([one["instance_id"] for one in msgspec.json.decode(file.read_bytes())["trajectory_ids"]])


def by_rllm(samples: Sequence[Sample]) -> list[list[int]]:
    """rLLM's own groups of our episodes."""
    transform = pytest.importorskip("rllm.trainer.algorithms.transform")
    config = Namespace(impute_missing_names=True, drop_unnamed_traj=False, broadcast=True, default_traj_name="x")
    episodes = rllm.to_episodes(samples)
    groups, _ = transform.transform_episodes_to_trajectory_groups(episodes, config)
    order = [id(trajectory) for episode in episodes for trajectory in episode.trajectories]
    return [[order.index(id(one)) for one in group.trajectories] for group in groups]


def by_cookbook(samples: Sequence[Sample]) -> list[list[int]]:
    """The lengths of the cookbook's groups."""
    pytest.importorskip("tinker_cookbook.rl.types")
    groups = tinker.to_trajectory_groups(samples)
    rewards = [list(group.final_rewards_G) for group in groups]
    assert rewards == [[samples[at].reward for at in members] for members in COMPARED]
    return numbers(samples, by_comparison(samples))


@pytest.mark.parametrize(
    "compared",
    [by_name, by_instance, *(pytest.param(one, marks=pytest.mark.trainer) for one in (by_rllm, by_cookbook))],
)
def test_a_door_compares_what_the_samples_name(compared: Callable[..., list[list[int]]]) -> None:
    """Solvers of one problem with each other; before, every door compared them with solvers of other problems."""
    assert compared(proposed()) == COMPARED


@pytest.mark.parametrize("door", [of_advantages, of_slime_centred, of_slime_scaled])
def test_advantages_are_those_of_the_named_comparison(door: Door) -> None:
    """Of prime-rl, tinker's datums and TRL's worker, and of slime: they add up to 0 in each comparison."""
    values = door(proposed())
    assert [sum(values[at] for at in members) for members in COMPARED] == pytest.approx([0, 0, 0], abs=1e-5)
    assert values[1] == pytest.approx(values[5])


@pytest.mark.parametrize(
    ("door", "message"),
    [
        (of_trl_rollout_func, "comparison: got 'episode'; expected seat: TRL compares the rows of one prompt"),
        (of_nemo, "its prompt ids: got .*NeMo-RL compares the rewards of one prompt"),
        (tinker.to_trajectory_group, "expected the samples of one group whose rewards are compared"),
    ],
)
def test_a_door_that_compares_otherwise_refuses(door: Any, message: str) -> None:
    """By name, and not in silence."""
    if door is of_nemo:
        pytest.importorskip("torch")
    with pytest.raises(ConfigError, match=message):
        door(proposed())


def test_openrlhf_takes_comparisons_of_one_size(tmp_path: Path) -> None:
    """It compares rows by their position: as many rows for each comparison, next to each other, or a refusal."""
    with pytest.raises(ConfigError, match=r"rows of a comparison: got \[2, 3\]; expected as many rows for each"):
        openrlhf.write_batch(proposed(), tmp_path / "rows.jsonl")
    openrlhf.write_batch(proposed(3), tmp_path / "rows.jsonl")
    whole, leaf, other = scored_groups(1, 3)
    leaf.rollout_id, leaf.conversation, leaf.parent = whole.rollout_id, 1, 0  # of rollouts, only some branch
    other.group_index = 1
    with pytest.raises(ConfigError, match=r"got \[1, 2\]; expected as many rows"):
        openrlhf.write_batch([whole, leaf, other], tmp_path / "rows.jsonl")
    rows = [msgspec.json.decode(line) for line in (tmp_path / "rows.jsonl").read_bytes().splitlines()]
    assert [row["reward"] for row in rows] == [0, 1, 2, 1, 0, 0, 2, 1, 1, 3, 2, 2]


@pytest.mark.trainer
def test_a_group_of_all_seats_is_one_of_the_cookbook() -> None:
    """``by="group"`` is the caller's word; before, it was refused as two seats."""
    pytest.importorskip("tinker_cookbook.rl.types")
    samples = two_seats()
    (group,) = tinker.to_trajectory_groups(samples, by="group")
    assert list(group.final_rewards_G) == [sample.reward for sample in samples]


def test_the_same_word_in_the_metadata_of_one_agent_is_the_users() -> None:
    """Only samples with a seat have a comparison; a wrong word there is refused."""
    samples = scored_groups(1, 2)
    for sample in samples:
        sample.metadata[COMPARISON] = "of two texts"
    assert by_name(samples) == [[0, 1]]
    samples[0].seat = "solver"
    with pytest.raises(ConfigError, match=r"metadata\['seat_comparison'\]: got 'of two texts'; expected one of"):
        by_name(samples)
