"""Plug-ins for slime's own rollout function: a custom generate function and a custom reward, one rollout at a time.

Invariant: ``generate`` always returns samples that slime can score, filter and train on: a rollout that fails all
attempts becomes a sample that slime removes from the loss
(slime 0.3.1, ray/rollout.py: RolloutManager._convert_samples_to_train_data), with the reason in
``metadata["failure"]``.

They need a recipe: ``args.rollouts_recipe`` or the variable ``ROLLOUTS_RECIPE``.
"""

from __future__ import annotations

import weakref
from asyncio import AbstractEventLoop, get_running_loop
from typing import Any

import attrs

from rollouts.dtypes import Prompt
from rollouts.errors import ConfigError, Failure, GenerateFailure
from rollouts.inference.policy import ServerPolicy
from rollouts.inference.shared import shared_policy
from rollouts.integrations.slime.buffer import Taken
from rollouts.integrations.slime.convert import check_trainable, from_slime, to_slime
from rollouts.integrations.slime.custom_calls import CustomCalls
from rollouts.integrations.slime.given_samples import check_given, shown_prompt
from rollouts.integrations.slime.pipeline import Pipeline, generator_of, policy_of_launch
from rollouts.integrations.slime.records import records
from rollouts.integrations.slime.settings import RECIPE_VARIABLE, Settings, VocabSizeOf, sampling_of
from rollouts.recipe import Recipe
from rollouts.rewards import score, score_group
from rollouts.training.rollout_attempt import score_branches
from rollouts.training.rows import check_fields, reward_of
from rollouts.training.types import Status

__all__ = ["generate", "policy_for", "removed_sample", "reward"]

_ATTEMPTS = 2


def policy_for(args: Any) -> ServerPolicy:
    """The client of slime's router, shared by every rollout of the running event loop."""
    settings = Settings.from_args(args)
    return shared_policy(settings.endpoint, VocabSizeOf(settings.endpoint.model))


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    """Play the recipe's agent for one of slime's samples.

    Returns:
        One sample, or a list if the rollout forks. The reward is set if the recipe's reward scores single samples.

    Raises:
        ConfigError, EnvironmentFailure: the recipe fails its first test, which runs once; or the sample brings ids, or
            images that its prompt does not show.
    """
    pipeline, recipe = _pipeline(args)
    config = recipe.config
    check_given(sample, recipe=True)
    await pipeline.check()
    places = {"group_index": sample.group_index, "index": sample.index}
    prompt = Prompt(shown_prompt(sample), label=sample.label, metadata=sample.metadata or {}, **places)
    sample.metadata = dict(prompt.metadata)  # it may be JSON text
    failure: Failure | None = None
    for _ in range(_ATTEMPTS):
        try:
            sampling = sampling_of({**pipeline.settings.params, **sampling_params})
            play = generator_of(recipe, pipeline.args, sampling, pipeline.policy, evaluation=evaluation)
            samples = list(await play([prompt]))
            lost = [entry for entry in samples if entry.status is Status.FAILED]
            if lost:
                failure = lost[0].failure
                continue
            if any(entry.status is Status.ABORTED for entry in samples):
                # slime stopped the engines (slime 0.3.1, rollout/sglang_rollout.py: abort).
                sample.status = records().sample.Status.ABORTED
                return sample
            for entry in samples:
                check_trainable(entry)
                check_fields(entry, "slime", "advantages")
            if config.reward_fn is not None and not config.group_rm:
                await score_branches(samples, config)
            replay = pipeline.replay.in_evaluation() if evaluation else pipeline.replay
            made = [to_slime(entry, template=sample, scored=False, replay=replay) for entry in samples]
            if (key := pipeline.settings.reward_key) is not None:
                for record in made:
                    record.reward = None if record.reward is None else {key: record.reward}
            if len(made) > 1:
                return made
            sample.__dict__.update(made[0].__dict__)  # slime's own object of the rollout: other code may reference it
            return sample
        except ConfigError as error:
            failure = Failure.of(GenerateFailure(str(error)))
        except Exception as error:  # noqa: BLE001 - an exception would end slime's loop and every rollout in flight
            failure = Failure.of(error)
    return removed_sample(sample, failure)


generate.abort_mode = "request"  # type: ignore[attr-defined]  # a cancelled call ends its own request


async def reward(args: Any, sample: Any, **_: Any) -> Any:
    """The recipe's reward for one of slime's samples, or for each of a list of them."""
    config = _pipeline(args)[1].config
    if config.reward_fn is None:
        raise ConfigError.of("recipe.config.reward_fn", None, "a function: --custom-rm-path names the recipe's reward")
    ours = [from_slime(each) for each in (sample if isinstance(sample, list) else [sample])]
    if config.group_rm:
        await score_group(ours, config.reward_fn, seconds=config.reward_seconds)
    else:
        for each in ours:
            await score(each, config.reward_fn, seconds=config.reward_seconds)
    rewards = [reward_of(each) for each in ours]
    return rewards if isinstance(sample, list) else rewards[0]


_PIPELINES: weakref.WeakKeyDictionary[AbstractEventLoop, list[Pipeline]] = weakref.WeakKeyDictionary()


def _pipeline(args: Any) -> tuple[Pipeline, Recipe]:
    """The pipeline of the launch, created once per event loop and set of flags, and its recipe."""
    if not hasattr(args, "sglang_router_ip"):
        from rollouts.integrations.slime import demo  # here: only this call needs the extra "engine"

        args = demo.args(args)
    # This function is that of the launch, and plays its data sets, too.
    settings = attrs.evolve(Settings.from_args(args), custom_generate=None, eval_sets=())
    pipelines = _PIPELINES.setdefault(get_running_loop(), [])
    pipeline = next((made for made in pipelines if made.settings == settings), None)
    if pipeline is None:
        client = policy_for(args)
        policy, no_groups = policy_of_launch(settings, client), dict[int, Taken]().__getitem__
        pipeline = Pipeline(args, settings, policy, CustomCalls(client.abort_all), no_groups)
        pipelines.append(pipeline)
    if pipeline.recipe is None:
        raise ConfigError.of("args.rollouts_recipe", None, f"a recipe there, or in {RECIPE_VARIABLE}")
    return pipeline, pipeline.recipe


def removed_sample(sample: Any, failure: Failure | None) -> Any:
    """Turn slime's sample into that of a failed rollout: the smallest valid one, removed from the loss."""
    sample.tokens, sample.response, sample.response_length = [0, 0], "", 1
    sample.loss_mask, sample.rollout_log_probs = [0], [0.0]
    sample.reward, sample.remove_sample = 0.0, True
    sample.status = records().sample.Status.FAILED
    reason = "" if failure is None else f"{failure.kind}: {failure.message}"
    sample.metadata = {**(sample.metadata or {}), "failure": reason}
    return sample
