"""From the settings of a launch to a :class:`RolloutConfig`: generate function, reward and filter.

Invariant: a rollout leaves :meth:`Pipeline.generate` only if it can be trained on or is excluded from training: a
sample that slime cannot process is a failed rollout, retried and counted like any other. Flags of the launch override
the recipe. slime's sample of a rollout is created once, when a function of slime first needs it or the rollout leaves;
the same object is used from then on.

In this module ``record`` is slime's sample and ``sample`` is ours. It schedules nothing, and reaches servers only
through its policy.
"""

from __future__ import annotations

import copy
import functools
import inspect
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeGuard

import anyio
import anyio.to_thread
import attrs

from rollouts.concurrency.boundary import function_name
from rollouts.dtypes import Prompt, SamplingParams, packed_tokens
from rollouts.errors import ConfigError, FilterFailure, GenerateFailure, shortened
from rollouts.inference.base import CompletionRequest, Policy
from rollouts.inference.generate_wire import MissingField
from rollouts.inference.resumable import InterruptiblePolicy, ResumablePolicy, SessionRecorder
from rollouts.integrations.episodes import load_function, option_texts
from rollouts.integrations.slime.buffer import Taken
from rollouts.integrations.slime.convert import Reading, add_teacher, check_trainable, to_slime
from rollouts.integrations.slime.custom_calls import CustomCalls
from rollouts.integrations.slime.given_samples import check_given, check_prompt_ids, has_images, is_begun
from rollouts.integrations.slime.records import family, records
from rollouts.integrations.slime.returned_samples import SlimeRecord, hooked, slime_sample_of
from rollouts.integrations.slime.scoring import SlimeFilter, SlimeReward, refuse_groups_of_one, score_by
from rollouts.integrations.slime.settings import EvalSet, Settings, stop_ids_of_params
from rollouts.integrations.slime.single_turn import codec_of, generate_single_turn, generate_with_slime
from rollouts.programs.generate import generate_function_batch, generate_program_batch
from rollouts.recipe import Recipe, check_recipe
from rollouts.recipe.files import build, built_in, load_recipe
from rollouts.rewards.teachers import Teacher
from rollouts.training.agent_integration import check_limits
from rollouts.training.config import RolloutConfig
from rollouts.training.rows import check_temperature
from rollouts.training.types import GenerateFn, GroupRewardFn, RewardFn, Sample, Status

__all__ = ["Pipeline", "find_recipe", "generator_of", "policy_of_launch"]

PROBE = (0, 0)
"""The prompt of the request that tests the server."""
_SIZES = ("batch_size", "n_samples_per_prompt", "over_sampling_factor", "in_flight")
_LOST = (Status.FAILED, Status.ABORTED)
_signature = functools.lru_cache(maxsize=64)(inspect.signature)


def find_recipe(settings: Settings) -> Recipe | None:
    """Build the recipe that the launch names, for the launch's endpoint.

    Raises:
        ConfigError: it cannot be loaded, or does not return a recipe.
    """
    if settings.recipe is None:
        return None
    path, _, function = settings.recipe.partition(":")
    of_file = path.endswith(".py") or path in built_in()
    make: Any = load_recipe(Path(path)) if of_file else load_function(path)
    if of_file and function:
        make = getattr(inspect.getmodule(make), function, None)
    if not callable(make):
        expected = "the name of a built-in recipe, file.py, file.py:function or package.module.function"
        raise ConfigError.of("rollouts_recipe", settings.recipe, expected)
    recipe = build(make, settings.endpoint, option_texts(settings.recipe_options), settings.endpoints)
    recipe.refuse_sampler("slime's data source")
    if not settings.template_kwargs:
        return recipe
    before = getattr(recipe.config.generate_fn, "keywords", {}).get("template_kwargs") or {}
    return recipe.with_options(template_kwargs={**before, **settings.template_kwargs})


def generator_of(
    recipe: Recipe, args: Any, sampling: SamplingParams, policy: Policy, *, evaluation: bool
) -> GenerateFn:
    """A recipe's generate function; if it accepts a policy, with this one and the launch's sampling, context."""
    generate_fn = recipe.config.generate_fn
    if not _is_agent_loop(generate_fn):
        return generate_fn
    options: dict[str, Any] = {"policy": policy, "sampling": sampling}
    context = getattr(args, "eval_max_context_len", None) if evaluation else None
    context = getattr(args, "rollout_max_context_len", None) if context is None else context
    if context is not None:
        bound = generate_fn.keywords
        if generate_fn.func in (generate_program_batch, generate_function_batch):
            window = min(context, bound.get("context_window") or context)
            return functools.partial(generate_fn, **options, context_window=window)
        limits = check_limits(bound.get("limits"), bound.get("max_turns"))
        options["limits"] = attrs.evolve(limits, max_tokens=min(context, limits.max_tokens or context))
    return functools.partial(generate_fn, **options)


def policy_of_launch(settings: Settings, client: InterruptiblePolicy, limiter: Any = None) -> ResumablePolicy:
    """The policy of the rollouts of a launch, over a client of its router; ``limiter`` is that of another policy."""
    return ResumablePolicy(
        client,
        decode=lambda ids: codec_of(settings.endpoint.model)[0].decode(ids),
        at_most=limiter or settings.at_most,
        stop_token_ids=stop_ids_of_params(settings.params),
        extras=settings.replay.request(),
    )


class Pipeline:
    """The functions of a launch: generate, reward and filter; of its training, or of a data set of its evaluation.

    Raises:
        ConfigError: the recipe does not load, or a flag contradicts it.
    """

    def __init__(
        self, args: Any, settings: Settings, policy: ResumablePolicy, calls: CustomCalls, taken: Callable[[Any], Taken]
    ) -> None:
        self.args = args
        self.settings = settings
        self.policy = policy
        self.calls = calls
        self.recipe = find_recipe(settings)
        try:
            self.teacher = None if settings.teacher_url is None else Teacher(settings.teacher_url)
        except ConfigError as error:
            raise ConfigError(f"args.rollouts_teacher_url: {error}") from None
        self.rollout_id = 0
        self.data: EvalSet | None = None
        """The data set of an evaluation; ``None`` in training."""
        self.params, self.sampling = settings.params, settings.endpoint.sampling
        self.replay = settings.replay
        self.reading = Reading(
            reward_key=settings.reward_key,
            any_reward=settings.reward_is_processed,
            needs_logprobs=settings.needs_logprobs,
        )
        """The expectations of the launch for samples of training or of a data set."""
        self._taken = taken
        """Finds the taken group of a group index."""
        self._checking, self._checked = anyio.Lock(), False
        if self.recipe is not None and settings.apply_chat_template:
            expected = "off with a recipe: its prompts are rendered with their tools, once"
            raise ConfigError.of("args.apply_chat_template", True, expected)
        if self.recipe is not None and settings.custom_generate is not None:
            expected = "none with a recipe, which plays every prompt"
            raise ConfigError.of("args.custom_generate_function_path", settings.custom_generate, expected)
        for data in settings.eval_sets:
            data.check(recipe=self.recipe is not None, custom_generate=settings.custom_generate)

    async def check(self) -> None:
        """Test the recipe's environment, template, tools and dialect, and the server's replies; once.

        Raises:
            ConfigError, EnvironmentFailure: as :func:`~rollouts.recipe.preflight`; or the server leaves out a column
                that the trainer replays.
        """
        async with self._checking:
            if not self._checked:
                await self._check()
                self._checked = True

    async def _check(self) -> None:
        flags = ", ".join(f"args.{flag}" for flag in self.settings.replay.fields.values())
        if self.recipe is not None and _is_agent_loop(self.recipe.config.generate_fn):
            await check_recipe(self.recipe)
        elif self.recipe is not None and flags:
            name = function_name(self.recipe.config.generate_fn)
            raise ConfigError.of(flags, f"set, with the generate_fn {name}", "a generate_fn that takes a policy")
        settings, sets = self.settings, self.settings.eval_sets
        plays_text = self.recipe is None and settings.custom_generate is None
        if plays_text or any(sampling.stop for sampling in (self.sampling, *(data.sampling for data in sets))):
            await anyio.to_thread.run_sync(codec_of, settings.endpoint.model)
        if not flags or settings.custom_generate is not None:
            return
        # Neither the server nor its router may leave out a column that the trainer replays.
        sampling = SamplingParams(max_new_tokens=1, top_p=self.sampling.top_p)
        try:
            await self.policy.complete(CompletionRequest(packed_tokens(PROBE), sampling))
        except MissingField as error:
            flag = "use_rollout_routing_replay" if error.field == "routed_experts" else "rollout_top_p"
            expected = f"a server that returns meta_info.{error.field} ({error})"
            raise ConfigError.of(f"args.{flag}", getattr(self.args, flag), expected) from error

    def for_evaluation(self, data: EvalSet, rollout_id: int, taken: Callable[[Any], Taken]) -> Pipeline:
        """A copy for one data set: its policy shares the limit of the training rollouts, but not their pauses."""
        other, policy = copy.copy(self), self.policy
        other.data, other.rollout_id, other._taken = data, rollout_id, taken
        other.params, other.sampling, other.teacher = data.params, data.sampling, None
        other.replay = self.replay.in_evaluation()
        other.reading = Reading(reward_key=self.settings.eval_reward_key, evaluation=True)
        settings = attrs.evolve(self.settings, params=data.params, replay=other.replay)
        other.policy = policy_of_launch(settings, policy.inner, policy.limiter)
        return other

    def training(self) -> RolloutConfig:
        """The config of training rollouts."""
        settings = self.settings
        base = self.recipe.config if self.recipe is not None else None
        sizes = {name: value for name in _SIZES if (value := getattr(settings, name)) is not None}
        options: dict[str, Any] = {**sizes, "generate_fn": self.generate, **self._limits()}
        if settings.group_rm and not settings.scored_by_slime and base is None:
            raise ConfigError.of("args.group_rm", True, "--custom-rm-path with it, or a recipe")
        if settings.scored_by_slime or base is None:
            reward = SlimeReward(self.args, settings.custom_rm, self.reading, self.record_of)
            options |= {"reward_fn": reward, "group_rm": settings.group_rm}
        if settings.filter_path is not None:
            name = getattr(load_function(settings.filter_path), "__name__", settings.filter_path)
            refuse_groups_of_one(name, settings.n_samples_per_prompt)
            options["filter_fn"] = SlimeFilter(self.args, settings.filter_path, self.unfiltered, self.read_reward)
        elif not settings.recipe_filter:
            options["filter_fn"] = None
        return attrs.evolve(base, **options) if base is not None else RolloutConfig(**options)

    def evaluation(self, rollouts: int) -> RolloutConfig:
        """The config of an evaluation: each rollout is its own group, and no group is filtered."""
        assert self.data is not None
        path = self.data.function("custom_rm_path") or self.settings.custom_rm
        reward: RewardFn | GroupRewardFn | None = None
        if self.recipe is None or self.settings.scored_by_slime or path or getattr(self.data.source, "rm_type", None):
            reward = SlimeReward(self.args, path, self.reading, self.record_of)
        elif not self.recipe.config.group_rm:
            reward = self.recipe.config.reward_fn
        return RolloutConfig(
            batch_size=rollouts,
            n_samples_per_prompt=1,
            over_sampling_factor=1.0,
            generate_fn=self.generate,
            reward_fn=reward,
            **{**self._limits(), "patience": rollouts + 1},
        )

    def _limits(self) -> dict[str, Any]:
        """Deadlines and attempts: those of the launch, or else of the recipe."""
        names = ("max_attempts", "rollout_seconds", "reward_seconds", "patience")
        found = {name: getattr(self.recipe.config, name) for name in names} if self.recipe is not None else {}
        of_launch = {name: getattr(self.settings, name) for name in names}
        return found | {name: value for name, value in of_launch.items() if value is not None}

    # -- one rollout --

    async def generate(self, prompts: Sequence[Prompt]) -> list[Sample]:
        """Play the rollout of one prompt: generate, check that it can be trained on, and run slime's sample hooks."""
        (prompt,) = prompts
        taken = self._taken(prompt.group_index)
        number = (prompt.index or 0) % len(taken.group)
        prompt = taken.own_prompt(number, prompt)
        taken.started.setdefault(number, time.time())
        record, recipe = taken.group[number], self.recipe is not None
        if self._custom(record) is None:
            check_given(record, recipe=recipe)
        if recipe and (path := getattr(record, "generate_function_path", None)):
            expected = "none with a recipe, which plays every sample"
            raise ConfigError.of(f"slime sample {record.index}.generate_function_path", path, expected)
        recorder = SessionRecorder(self.policy)
        samples = await self._play(prompt, record, recorder)
        if recorder.sessions:
            taken.sessions[number] = recorder.sessions[0]
        if any(sample.status in _LOST for sample in samples):
            return samples
        for branch, sample in enumerate(samples):
            sample.group_index, sample.index = prompt.group_index, prompt.index  # as the manager does later
            try:
                if slime_sample_of(sample) is None:  # a sample of slime's function was checked on return
                    check_trainable(sample)
                    if self.data is None:
                        check_temperature(sample, "slime", self.params["temperature"])
                if self.settings.sample_hooks or prompt is not prompts[0]:
                    self.record_of(sample)  # which owns prompt and label; those of the group may be others
                if self.settings.sample_hooks:
                    samples[branch] = await hooked(sample, prompt, branch, self.reading, self._call_hooks)
                if self.teacher is not None:
                    await score_by(self.teacher, samples[branch], self.record_of(samples[branch]))
            except ConfigError as error:
                raise GenerateFailure(str(error)) from error
        return samples

    async def _play(self, prompt: Prompt, record: Any, policy: Policy) -> list[Sample]:
        """Generate with the recipe, a custom function, slime's own function, or one request."""
        settings, params, sampling = self.settings, self.params, self.sampling
        if settings.seed is not None:
            size = settings.n_samples_per_prompt if self.data is None else self.data.n_samples
            seed = settings.seed + (prompt.index or 0) % size
            params, sampling = {**params, "sampling_seed": seed}, attrs.evolve(sampling, seed=seed)
        if self.recipe is not None:
            generate = generator_of(self.recipe, self.args, sampling, policy, evaluation=self.data is not None)
            return list(await generate([prompt]))
        path, images = self._custom(record), has_images(record)
        if not (path or images or is_begun(record)):
            endpoint, context = settings.endpoint, settings.max_context
            options: dict[str, Any] = {"policy": policy, "sampling": sampling, "max_context": context}
            return [await generate_single_turn(prompt, endpoint=endpoint, **options)]
        resumes = settings.partial_rollout and self.data is None
        on_abort: Literal["fail", "resume", "restart"] = "fail" if path else "restart"
        samples = await generate_with_slime(
            prompt,
            args=self.args,
            path=path or f"{family().package}.rollout.sglang_rollout.generate",
            argument=record,
            params=params,
            calls=self.calls,
            policy=self.policy,
            reading=self.reading,
            on_abort="resume" if resumes and (path or not images) else on_abort,
            settings=settings,
        )
        if images and not path:
            # slime sends such a prompt as text: the server expands its images, and slime's processor makes the ids
            # (slime 0.3.1, rollout/sglang_rollout.py: generate).
            for sample in samples:
                check_prompt_ids(slime_sample_of(sample))
        return samples

    def _custom(self, record: Any) -> str | None:
        """The path of the custom generate function: that of slime's sample, or of the launch."""
        if self.recipe is not None:
            return None
        return getattr(record, "generate_function_path", None) or self.settings.custom_generate

    # -- slime's sample of ours --

    def record_of(self, sample: Sample, taken: Taken | None = None) -> Any:
        """slime's sample of ours; created without a reward on the first call.

        ``taken`` is its group, if the buffer no longer has it.
        """
        record = slime_sample_of(sample)
        if record is not None:
            return record
        taken = taken or self._taken(sample.group_index)
        number = (sample.index or 0) % len(taken.group)
        settings, evaluation = self.settings, self.data is not None
        keeps_session = settings.keeps_session and (not evaluation or family().router_policy is not None)
        record = to_slime(
            sample,
            template=taken.group[number],
            mask_earlier_versions=settings.mask_earlier_versions and not evaluation,
            session=taken.sessions.get(number, "") if keeps_session else "",
            scored=False,
            replay=self.replay,
            checked=sample.status not in _LOST,  # by generate
            kl_weights=settings.kl_weights,
        )
        given = taken.group[number]  # a recipe's reward replaces that of the data source, slime does not
        is_open = getattr(given.status, "value", "") in ("pending", "aborted")  # (as its generate_and_rm, above)
        record.reward = given.reward if is_open and (self.recipe is None or settings.scored_by_slime) else None
        if evaluation:
            record.group_index = None  # as in slime; the rows of a data set are in order
        if self.params["skip_special_tokens"]:
            codec, _ = codec_of(settings.endpoint.model)
            record.response = codec.decode(sample.token_column[-sample.response_length :], skip_special=True)
        sample.metadata = record.metadata  # shared: both sides see later changes
        sample.trainer_record = SlimeRecord(record)
        return record

    def finished(self, sample: Sample, taken: Taken | None = None) -> Any:
        """slime's sample of ours, with the reward; after a filter of slime it stays as the filter left it."""
        record = self.record_of(sample, taken)
        if record.teacher_log_probs is None:  # else the record is younger than the teacher's scores
            add_teacher(record, sample, self.settings.kl_weights)
        if sample.trainer_record.owns_reward or (self.reading.any_reward and record.reward is not None):
            return record
        key = self.settings.reward_key
        lacks_key = key is not None and not isinstance(record.reward, dict)
        if lacks_key or self.reading.number(record.reward) != sample.reward:
            record.reward = sample.reward if key is None else {key: sample.reward}
        return record

    def unfiltered(self, sample: Sample) -> Any:
        """slime's sample of ours for a filter of slime: with the reward that it had before any filter."""
        link = sample.trainer_record
        if isinstance(link, SlimeRecord) and link.owns_reward:
            link.sample.reward, link.owns_reward = link.unfiltered, False
        record = self.finished(sample)
        reward = record.reward
        link = sample.trainer_record
        link.unfiltered, link.owns_reward = dict(reward) if isinstance(reward, dict) else reward, True
        return record

    def read_reward(self, sample: Sample) -> None:
        """Set the reward of ours to that of slime's sample, which owns it from now on.

        Raises:
            FilterFailure: it is not a finite number.
        """
        link = sample.trainer_record
        reward, reading = link.sample.reward, self.reading
        number, key = reading.number(reward), reading.reward_key
        if number is None or (key is not None and not reading.any_reward and not isinstance(reward, dict)):
            part = "" if key is None else f" under the key {key!r}"
            place = f"{self.settings.filter_path}: reward of slime sample {link.sample.index}"
            raise FilterFailure(f"{place}: got {shortened(reward)}; expected a finite number{part}")
        sample.reward = number

    def returned(self, sample: Sample, taken: Taken) -> Any:
        """slime's sample of ours for its data source, from which it meets the filter again."""
        record, link = copy.copy(self.finished(sample, taken)), sample.trainer_record
        if link.owns_reward:  # also while the filter runs, or ours is in a batch before the process ends
            record.reward = link.unfiltered
        return record

    async def _call_hooks(self, record: Any) -> Any:
        """Call the sample hooks in order; return slime's sample, or that of a hook in its place."""
        for path in self.settings.sample_hooks:
            hook = load_function(path)
            options = {"rollout_id": self.rollout_id, "evaluation": self.data is not None}
            parameters = inspect.signature(hook).parameters
            if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
                options = {name: value for name, value in options.items() if name in parameters}
            result = hook(self.args, record, **options)
            result = await result if inspect.isawaitable(result) else result
            record = record if result is None else result
            if not isinstance(record, records().sample):
                raise GenerateFailure(f"sample hook {function_name(hook)}: got {record!r}; expected a Sample or None")
        return record


def _is_agent_loop(generate_fn: GenerateFn) -> TypeGuard[functools.partial[Any]]:
    """Whether a recipe's generate function has its options bound, and accepts a policy, as ours do."""
    if not isinstance(generate_fn, functools.partial):
        return False
    parameters = _signature(generate_fn.func).parameters
    return "policy" in parameters or any(entry.kind is entry.VAR_KEYWORD for entry in parameters.values())
