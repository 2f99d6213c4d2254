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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeGuard

import anyio
import anyio.to_thread
import attrs
import msgspec

from rollouts.concurrency.boundary import function_name
from rollouts.dtypes import Limits, Prompt, SamplingParams, packed_tokens
from rollouts.errors import ConfigError, FilterFailure, GenerateFailure, shortened
from rollouts.inference.base import CompletionRequest, Policy
from rollouts.inference.generate_wire import MissingField
from rollouts.inference.policy import ServerPolicy
from rollouts.inference.resumable import ResumablePolicy, SessionRecorder
from rollouts.integrations.slime.buffer import Taken
from rollouts.integrations.slime.convert import check_trainable, reward_number, to_slime
from rollouts.integrations.slime.custom_calls import CustomCalls
from rollouts.integrations.slime.given_ids import check_function, check_given, is_begun
from rollouts.integrations.slime.images import check_media, check_prompt_ids, has_images
from rollouts.integrations.slime.records import family, records
from rollouts.integrations.slime.returned_samples import Reading, SlimeRecord, slime_sample_of, view
from rollouts.integrations.slime.scoring import SlimeFilter, SlimeReward
from rollouts.integrations.slime.settings import (
    EvalSet,
    Settings,
    load_function,
    sampling_of,
    stop_ids_of_params,
)
from rollouts.integrations.slime.single_turn import (
    codec_of,
    decoder_of,
    generate_single_turn,
    generate_with_slime,
)
from rollouts.integrations.slime.teacher import Teacher
from rollouts.programs.generate import generate_function_batch, generate_program_batch
from rollouts.recipe import Recipe, check_recipe
from rollouts.recipe.files import build, built_in, load_recipe
from rollouts.training.config import RolloutConfig
from rollouts.training.rows import check_temperature
from rollouts.training.types import GenerateFn, GroupRewardFn, RewardFn, Sample, Status

__all__ = ["Pipeline", "find_recipe", "policy_of_launch"]

PROBE = (0, 0)
"""The prompt of the request that tests the server."""
_LOST = (Status.FAILED, Status.ABORTED)


def find_recipe(settings: Settings) -> Recipe | None:
    """Build the recipe that the launch names, for the launch's endpoint.

    Raises:
        ConfigError: it cannot be loaded, or does not return a recipe.
    """
    if settings.recipe is None:
        return None
    path, _, function = settings.recipe.partition(":")
    make: Any
    if path.endswith(".py") or path in built_in():
        make = load_recipe(Path(path))
        if function:
            make = getattr(inspect.getmodule(make), function, None)
    else:
        make = load_function(path)
    if not callable(make):
        raise ConfigError.of(
            "rollouts_recipe",
            settings.recipe,
            "the name of a built-in recipe, file.py, file.py:function or package.module.function",
        )
    texts = {
        name: value if isinstance(value, str) else msgspec.json.encode(value).decode()
        for name, value in settings.recipe_options.items()
    }
    recipe = build(make, settings.endpoint, texts, settings.endpoints)
    recipe.refuse_sampler("slime's data source")
    if not settings.template_kwargs:
        return recipe
    before = getattr(recipe.config.generate_fn, "keywords", {}).get("template_kwargs") or {}
    return recipe.with_options(template_kwargs={**before, **settings.template_kwargs})


def policy_of_launch(settings: Settings, client: ServerPolicy) -> ResumablePolicy:
    """The policy of the rollouts of a launch, over a client of its router."""
    return ResumablePolicy(
        client,
        decode=decoder_of(settings.endpoint.model),
        at_most=settings.at_most,
        stop_token_ids=stop_ids_of_params(settings.params),
        extras=settings.replay.request(),
    )


class Pipeline:
    """The functions of a launch: generate, reward and filter.

    Args:
        args: slime's namespace, for functions of slime.
        settings: parsed from ``args``.
        policy: the policy of the agent loop.
        calls: runs custom generate functions.
        taken: finds the taken group of a group index.

    Raises:
        ConfigError: the recipe does not load, or a flag contradicts it.
    """

    def __init__(
        self,
        args: Any,
        settings: Settings,
        policy: ResumablePolicy,
        calls: CustomCalls,
        taken: Callable[[int], Taken | None],
    ) -> None:
        self.args = args
        self.settings = settings
        self.policy = policy
        self.calls = calls
        self.recipe = find_recipe(settings)
        url, temperature = settings.teacher_url, settings.endpoint.sampling.temperature
        self.teacher = None if url is None else Teacher(url, temperature)
        self.rollout_id = 0
        self.rows: Sequence[Any] = ()
        """In the evaluation of a data set with images: slime's sample of each row."""
        self.started: dict[int, float] = {}
        """In an evaluation: the unix time at which each rollout began, by its index."""
        self._taken = taken
        self._checking, self._checked = anyio.Lock(), False
        if self.recipe is not None and settings.apply_chat_template:
            raise ConfigError.of(
                "args.apply_chat_template", True, "off with a recipe: its prompts are rendered with their tools, once"
            )
        if self.recipe is not None and settings.custom_generate is not None:
            expected = "none with a recipe, which plays every prompt"
            raise ConfigError.of("args.custom_generate_function_path", settings.custom_generate, expected)
        for data in settings.eval_sets:
            self._check_text(data)

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
        samplings = (self.settings.endpoint.sampling, *(data.sampling for data in self.settings.eval_sets))
        text_only = self.recipe is None and not all(map(self._custom, (None, *self.settings.eval_sets)))
        if text_only or any(sampling.stop for sampling in samplings):
            await anyio.to_thread.run_sync(codec_of, self.settings.endpoint.model)
        if flags and self._custom(None) is None:
            await self._check_replay()

    async def _check_replay(self) -> None:
        """Send one request, and check that its reply has every column that the trainer replays.

        Raises:
            ConfigError: the server, or a router before it, leaves one out.
        """
        sampling = SamplingParams(max_new_tokens=1, top_p=self.settings.endpoint.sampling.top_p)
        try:
            await self.policy.complete(CompletionRequest(packed_tokens(PROBE), sampling))
        except MissingField as error:
            flag = "use_rollout_routing_replay" if error.field == "routed_experts" else "rollout_top_p"
            expected = f"a server that returns meta_info.{error.field} ({error})"
            raise ConfigError.of(f"args.{flag}", getattr(self.args, flag), expected) from error

    def for_evaluation(self, data: EvalSet, rollout_id: int) -> Pipeline:
        """A copy for one data set: its policy shares the limit of the training rollouts, but not their pauses."""
        other = copy.copy(self)
        stops = stop_ids_of_params(data.params)
        extras = self.settings.replay.request(evaluation=True)
        policy = self.policy
        other.policy = ResumablePolicy(
            policy.inner, decode=policy.decode, at_most=policy.limiter, stop_token_ids=stops, extras=extras
        )
        other.rollout_id, other.started = rollout_id, {}
        return other

    def training(self) -> RolloutConfig:
        """The config of training rollouts."""
        settings = self.settings
        base = self.recipe.config if self.recipe is not None else None
        options: dict[str, Any] = {
            "batch_size": settings.batch_size,
            "n_samples_per_prompt": settings.n_samples_per_prompt,
            "over_sampling_factor": settings.over_sampling_factor,
            "generate_fn": self.generate,
        }
        if settings.in_flight is not None:
            options["in_flight"] = settings.in_flight
        options |= self._limits()
        if settings.group_rm and not settings.scored_by_slime and base is None:
            raise ConfigError.of("args.group_rm", True, "--custom-rm-path with it, or a recipe")
        if settings.scored_by_slime or base is None:
            key, is_processed = settings.reward_key, settings.reward_is_processed
            reward = SlimeReward(self.args, settings.custom_rm, key, self.record_of, any_reward=is_processed)
            options |= {"reward_fn": reward, "group_rm": settings.group_rm}
        if settings.filter_path is not None:
            options["filter_fn"] = SlimeFilter.of(settings, self.args, self.unfiltered, self.read_reward)
        elif not settings.recipe_filter:
            options["filter_fn"] = None
        return attrs.evolve(base, **options) if base is not None else RolloutConfig(**options)

    def evaluation(self, data: EvalSet, prompts: int) -> RolloutConfig:
        """The config of an evaluation: each rollout is its own group, and no group is filtered."""
        source = data.source
        path = getattr(source, "custom_rm_path", None) or self.settings.custom_rm
        reward: RewardFn | GroupRewardFn | None = None
        if self.recipe is None or self.settings.scored_by_slime or path is not None or getattr(source, "rm_type", None):
            record_of = functools.partial(self.record_of, data=data)
            reward = SlimeReward(self.args, path, self.settings.eval_reward_key, record_of)
        elif not self.recipe.config.group_rm:
            reward = self.recipe.config.reward_fn
        return RolloutConfig(
            batch_size=prompts,
            n_samples_per_prompt=1,
            over_sampling_factor=1.0,
            generate_fn=functools.partial(self.generate, data=data),
            reward_fn=reward,
            **{**self._limits(), "patience": prompts + 1},
        )

    def _limits(self) -> dict[str, Any]:
        """Deadlines and attempts: those of the launch, or else of the recipe."""
        names = ("max_attempts", "rollout_seconds", "reward_seconds", "patience")
        found = {name: getattr(self.recipe.config, name) for name in names} if self.recipe is not None else {}
        of_launch = {name: getattr(self.settings, name) for name in names}
        return found | {name: value for name, value in of_launch.items() if value is not None}

    # -- one rollout --

    async def generate(self, prompts: Sequence[Prompt], *, data: EvalSet | None = None) -> list[Sample]:
        """Play one rollout: generate, check that it can be trained on, and run slime's sample hooks.

        Args:
            prompts: one.
            data: the data set of an evaluation.
        """
        (prompt,) = prompts
        taken, number = self._place(prompt, data)
        if taken is not None:
            prompt = taken.own_prompt(number, prompt)
        started, key = (self.started, prompt.index) if taken is None else (taken.started, number)
        started.setdefault(key or 0, time.time())
        record = self._template(prompt, data) if taken is not None or self.rows else None
        if record is not None and self._custom(data, record) is None:
            check_media(record, recipe=self.recipe is not None)
            check_given(record, recipe=self.recipe is not None)
            if self.recipe is not None:
                check_function(record)
        recorder = SessionRecorder(self.policy)
        samples = list(await self._generator(data, number, recorder)([prompt]))
        sessions = recorder.sessions
        if taken is not None and sessions:
            taken.sessions[number] = sessions[0]
        if any(sample.status in _LOST for sample in samples):
            return samples
        if data is not None and sessions and self.settings.keeps_session and family().router_policy is not None:
            for sample in samples:
                setattr(self.record_of(sample, data=data), family().session, sessions[0])
        for branch, sample in enumerate(samples):
            try:
                if slime_sample_of(sample) is None:  # a sample of slime's function was checked on return
                    check_trainable(sample)
                    if data is None:
                        check_temperature(sample, "slime", self.settings.params["temperature"])
                if self.settings.sample_hooks:
                    samples[branch] = await self._hooked(sample, prompt, branch, data)
                if self.teacher is not None and data is None:
                    if has_images(self._numbered_record(samples[branch], prompt, data)):
                        expected = "none for samples with images: its requests have token ids only"
                        raise ConfigError.of("args.rollouts_teacher_url", self.settings.teacher_url, expected)
                    await self.teacher.score(self._numbered_record(samples[branch], prompt, data))
            except ConfigError as error:
                raise GenerateFailure(str(error)) from error
        return samples

    def recipe_sampled_like(self, params: Mapping[str, Any], *, evaluation: bool) -> GenerateFn:
        """The recipe's generate function with the sampling parameters that slime passes to a custom one."""
        assert self.recipe is not None
        sampling = sampling_of({**self.settings.params, **params})
        return self._recipe_generator(self.recipe.config.generate_fn, sampling, self.policy, evaluation=evaluation)

    def record_of(self, sample: Sample, taken: Taken | None = None, *, data: EvalSet | None = None) -> Any:
        """slime's sample of ours; created without a reward on the first call.

        Args:
            sample: our sample.
            taken: its group, if the buffer no longer has it.
            data: the data set of an evaluation, which has no groups.
        """
        record = slime_sample_of(sample)
        if record is None:
            if taken is None and data is None and sample.group_index is not None:
                taken = self._taken(sample.group_index)
            number = (sample.index or 0) % self.settings.n_samples_per_prompt
            record = to_slime(
                sample,
                template=None if taken is None else taken.group[number],
                mask_earlier_versions=self.settings.mask_earlier_versions and data is None,
                session="" if taken is None or not self.settings.keeps_session else taken.sessions.get(number, ""),
                scored=False,
                replay=self.settings.replay,
                evaluation=data is not None,
                checked=sample.status not in _LOST,  # by generate
            )
            record.reward = self._given_reward(taken, number) if data is None else None
            if data is not None:
                record.group_index = None  # as in slime; the rows of a data set are in order
                if self.rows:
                    inputs = self._row(sample.group_index, data).multimodal_inputs
                    record.multimodal_inputs = {**(inputs or {}), **(record.multimodal_inputs or {})}
                for name, path in _functions_of(data).items():
                    setattr(record, name, path)
            if (self.settings.params if data is None else data.params)["skip_special_tokens"]:
                codec, _ = codec_of(self.settings.endpoint.model)
                record.response = codec.decode(sample.token_column[-sample.response_length :], skip_special=True)
            sample.metadata = record.metadata  # shared: both sides see later changes
            sample.trainer_record = SlimeRecord(record)
        return record

    def finished(self, sample: Sample, taken: Taken | None = None, *, data: EvalSet | None = None) -> Any:
        """slime's sample of ours, with the reward; after a filter of slime it stays as the filter left it."""
        record = self.record_of(sample, taken, data=data)
        if sample.trainer_record.owns_reward:
            return record
        if data is None and self.settings.reward_is_processed and record.reward is not None:
            return record
        key = self.settings.reward_key
        if key is not None and not isinstance(record.reward, dict):
            record.reward = {key: sample.reward}
        elif reward_number(record.reward, self.reading(data).reward_key) != sample.reward:
            record.reward = sample.reward if key is None else {key: sample.reward}
        return record

    def _given_reward(self, taken: Taken | None, number: int) -> Any:
        """The reward that the data source set: a recipe's reward replaces it, slime does not.

        (slime 0.3.1, rollout/sglang_rollout.py: generate_and_rm)
        """
        if taken is None or (self.recipe is not None and not self.settings.scored_by_slime):
            return None
        record = taken.group[number]
        return record.reward if getattr(record.status, "value", "") in ("pending", "aborted") else None

    def unfiltered(self, sample: Sample) -> Any:
        """slime's sample of ours for a filter of slime: with the reward that it had before any filter."""
        link = sample.trainer_record
        if isinstance(link, SlimeRecord) and link.owns_reward:
            link.sample.reward, link.owns_reward = link.unfiltered, False
        record = self.finished(sample)
        reward = record.reward
        sample.trainer_record.unfiltered = dict(reward) if isinstance(reward, dict) else reward
        return record

    def read_reward(self, sample: Sample) -> None:
        """Set the reward of ours to that of slime's sample, which owns it from now on.

        Raises:
            FilterFailure: it is not a finite number.
        """
        link = sample.trainer_record
        link.owns_reward = True
        reward, key, any_reward = link.sample.reward, self.settings.reward_key, self.settings.reward_is_processed
        number = self.reading().number(reward)
        if number is None or (key is not None and not any_reward and not isinstance(reward, dict)):
            part = "" if key is None else f" under the key {key!r}"
            place = f"{self.settings.filter_path}: reward of slime sample {link.sample.index}"
            raise FilterFailure(f"{place}: got {shortened(reward)}; expected a finite number{part}")
        sample.reward = number

    def returned(self, sample: Sample, taken: Taken) -> Any:
        """slime's sample of ours for its data source, from which it meets the filter again."""
        record, link = self.finished(sample, taken), sample.trainer_record
        if link.owns_reward:
            record = copy.copy(record)  # ours may be in a batch before the process ends
            record.reward = link.unfiltered
        return record

    def reading(self, data: EvalSet | None = None) -> Reading:
        """The expectations of the launch for samples of training or of a data set."""
        settings = self.settings
        if data is not None:
            return Reading(reward_key=settings.eval_reward_key, evaluation=True)
        needs_logprobs = settings.needs_logprobs
        return Reading(
            reward_key=settings.reward_key, any_reward=settings.reward_is_processed, needs_logprobs=needs_logprobs
        )

    def _check_text(self, data: EvalSet) -> None:
        """Refuse what this package's own rollouts would ignore; a custom generate function gets it."""
        if self._custom(data) is None and not data.params["no_stop_trim"]:
            name = f"eval data set {data.name}.no_stop_trim"
            raise ConfigError.of(name, False, "true: the response keeps the text that ends it, as its tokens do")
        function = _function_of(data, "generate_function_path")
        if self.recipe is not None and function is not None:
            name = f"eval data set {data.name}.custom_generate_function_path"
            raise ConfigError.of(name, function, "none with a recipe, which plays every prompt")
        if self.recipe is not None and data.apply_chat_template and data.chat_template_kwargs:
            name = f"eval data set {data.name}.apply_chat_template_kwargs"
            raise ConfigError.of(name, data.chat_template_kwargs, "nothing with a recipe: its prompts are messages")

    def _custom(self, data: EvalSet | None, record: Any = None) -> str | None:
        """The path of the custom generate function: that of slime's sample, of its data set, or of the launch."""
        if self.recipe is not None:
            return None
        named = getattr(record, "generate_function_path", None) or _function_of(data, "generate_function_path")
        return named or self.settings.custom_generate

    def _place(self, prompt: Prompt, data: EvalSet | None) -> tuple[Taken | None, int]:
        """The group of a rollout, and the rollout's number among those of its prompt."""
        if data is not None:
            return None, (prompt.group_index or 0) % data.n_samples
        if prompt.group_index is None or prompt.index is None:
            return None, 0
        return self._taken(prompt.group_index), prompt.index % self.settings.n_samples_per_prompt

    def _template(self, prompt: Prompt, data: EvalSet | None) -> Any:
        """slime's sample that a custom generate function gets as argument."""
        taken, number = self._place(prompt, data)
        if taken is not None:
            return taken.group[number]
        if self.rows and data is not None:
            row = copy.copy(self._row(prompt.group_index, data))
            row.index, row.metadata = prompt.index, dict(prompt.metadata)
            for name, path in _functions_of(data).items():
                setattr(row, name, path)
            return row
        chat = prompt.prompt if isinstance(prompt.prompt, str) else [message.to_chat() for message in prompt.messages]
        return records().sample(
            prompt=chat,
            label=prompt.label,
            metadata=dict(prompt.metadata),
            index=prompt.index,
            **_functions_of(data),
        )

    def _row(self, group_index: int | None, data: EvalSet) -> Any:
        """slime's sample of the row that a rollout of an evaluation with images plays."""
        return self.rows[(group_index or 0) // data.n_samples]

    def _generator(self, data: EvalSet | None, number: int, policy: Policy) -> GenerateFn:
        """The generate function: the recipe's, a custom one, or a single reply to the prompt."""
        settings = self.settings
        params, sampling = settings.params, settings.endpoint.sampling
        if data is not None:
            params, sampling = data.params, data.sampling
        if settings.seed is not None:
            seed = settings.seed + number
            params, sampling = {**params, "sampling_seed": seed}, attrs.evolve(sampling, seed=seed)
        return self._sampled(params, sampling, data, policy)

    def _sampled(
        self, params: Mapping[str, Any], sampling: SamplingParams, data: EvalSet | None, policy: Policy
    ) -> GenerateFn:
        settings = self.settings
        if self.recipe is not None:
            return self._recipe_generator(self.recipe.config.generate_fn, sampling, policy, evaluation=data is not None)
        with_slime = functools.partial(
            generate_with_slime,
            args=self.args,
            template=functools.partial(self._template, data=data),
            params=params,
            calls=self.calls,
            policy=self.policy,
            reading=self.reading(data),
            keeps_session=settings.keeps_session,
        )
        resumes = settings.partial_rollout and data is None
        mask_earlier = resumes and settings.mask_earlier_versions
        single_turn = functools.partial(
            generate_single_turn,
            policy=policy,
            model=settings.endpoint.model,
            sampling=sampling,
            endpoint=settings.endpoint,
            max_context=settings.max_context,
        )

        async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
            (prompt,) = prompts
            record = self._template(prompt, data)
            path = self._custom(data, record)
            if path is not None:
                on_abort: Literal["resume", "fail"] = "resume" if resumes else "fail"
                return await with_slime(prompts, path=path, on_abort=on_abort, mask_earlier=mask_earlier)
            if has_images(record):
                # slime sends such a prompt as text: the server expands its images, and slime's processor makes the ids
                # (slime 0.3.1, rollout/sglang_rollout.py: generate).
                samples = await with_slime(prompts, path=family().generate, on_abort="restart")
                for sample in samples:
                    check_prompt_ids(slime_sample_of(sample))
                return samples
            if is_begun(record):
                return await with_slime(
                    prompts,
                    path=family().generate,
                    on_abort="resume" if resumes else "restart",
                    mask_earlier=mask_earlier,
                )
            return await single_turn(prompts)

        return generate

    def _recipe_generator(
        self, generate_fn: GenerateFn, sampling: SamplingParams, policy: Policy, *, evaluation: bool
    ) -> GenerateFn:
        """The recipe's generate function; if it accepts a policy, with this one and the launch's sampling, context."""
        if not _is_agent_loop(generate_fn):
            return generate_fn
        options: dict[str, Any] = {"policy": policy, "sampling": sampling}
        context = getattr(self.args, "eval_max_context_len", None) if evaluation else None
        context = getattr(self.args, "rollout_max_context_len", None) if context is None else context
        if context is not None:
            bound = generate_fn.keywords
            if generate_fn.func in (generate_program_batch, generate_function_batch):
                window = min(context, bound.get("context_window") or context)
                return functools.partial(generate_fn, **options, context_window=window)
            turns = bound.get("max_turns")
            limits = bound.get("limits") or (Limits() if turns is None else Limits(max_turns=turns))
            options["limits"] = attrs.evolve(limits, max_tokens=min(context, limits.max_tokens or context))
        return functools.partial(generate_fn, **options)

    def _numbered_record(self, sample: Sample, prompt: Prompt, data: EvalSet | None) -> Any:
        """slime's sample of ours, before the manager has numbered it."""
        sample.group_index = prompt.group_index if sample.group_index is None else sample.group_index
        sample.index = prompt.index if sample.index is None else sample.index
        return self.record_of(sample, data=data)

    async def _hooked(self, sample: Sample, prompt: Prompt, branch: int, data: EvalSet | None) -> Sample:
        """Run the sample hooks; if they changed the tokens, return a sample with the changed columns."""
        evaluation = data is not None
        record = self._numbered_record(sample, prompt, data)
        rollout, before = sample.trainer_record.rollout, _columns(record)
        for path in self.settings.sample_hooks:
            hook = load_function(path)
            options = {"rollout_id": self.rollout_id, "evaluation": evaluation}
            parameters = inspect.signature(hook).parameters
            if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
                options = {name: value for name, value in options.items() if name in parameters}
            result = hook(self.args, record, **options)
            result = await result if inspect.isawaitable(result) else result
            if result is not None:
                record = result
            if not isinstance(record, records().sample):
                raise GenerateFailure(f"sample hook {function_name(hook)}: got {record!r}; expected a Sample or None")
        if rollout is not None:
            rollout[branch] = record
        changed = view(record, prompt, self.reading(data), rollout)
        if before != _columns(record):
            return changed
        sample.trainer_record = changed.trainer_record
        sample.metadata = changed.metadata if record.metadata is None else record.metadata
        sample.response, sample.label, sample.status = record.response, record.label, changed.status
        sample.reward = sample.reward if record.reward is None else changed.reward
        return sample


def _function_of(data: EvalSet | None, name: str) -> str | None:
    """The path of a function that a data set names, by the field of slime's sample."""
    if name == "generate_function_path":
        name = "custom_generate_function_path"
    path: str | None = getattr(data and data.source, name, None)
    return path


def _functions_of(data: EvalSet | None) -> dict[str, str | None]:
    """The functions that a data set names, by the fields of slime's sample; miles' has only one of them."""
    known = records().sample.__dataclass_fields__
    names = ("custom_rm_path", "generate_function_path")
    return {name: _function_of(data, name) for name in names if name in known}


def _columns(record: Any) -> tuple[list[Any], ...]:
    """A copy of the columns of slime's sample."""
    columns = (record.tokens, record.loss_mask, record.rollout_log_probs)
    return tuple([] if column is None else list(column) for column in columns)


def _is_agent_loop(generate_fn: GenerateFn) -> TypeGuard[functools.partial[Any]]:
    """Whether a recipe's generate function has its options bound, and accepts a policy."""
    return isinstance(generate_fn, functools.partial) and _takes_a_policy(generate_fn.func)


@functools.lru_cache(maxsize=64)
def _takes_a_policy(function: Callable[..., Any]) -> bool:
    """Whether a generate function accepts ``policy`` and ``sampling``, as ``generate_rollout_batch`` does."""
    parameters = inspect.signature(function).parameters
    return "policy" in parameters or any(entry.kind is entry.VAR_KEYWORD for entry in parameters.values())
