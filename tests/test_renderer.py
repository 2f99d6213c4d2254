"""The renderer with real tokenizers and real templates: openings, bridges, seams, parsing."""

import concurrent.futures
import datetime
import gc
import json
import shutil
import subprocess
import sys
import weakref

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from rollouts.dtypes import Message, Tool, ToolCall
from rollouts.environments.calculator import CalculatorEnvironment
from rollouts.errors import ConfigError
from rollouts.renderer import Renderer, load_tokenizer, renderer_for

TOOLS = CalculatorEnvironment().tools
SYSTEM, USER = Message("system", "Be brief."), Message("user", "What is 1 + 2?")
CALL = ToolCall("add", {"a": 1, "b": 2}, id="call00001")
CALLING = Message("assistant", tool_calls=(CALL,))
RESULT = Message("tool", "3", tool_call_id=CALL.id, name=CALL.name)
FINAL = Message("assistant", "The answer is 3.")
STABLE = ["Qwen-Qwen2.5-7B-Instruct", "trl-qwen3_instruct_2507"]


@pytest.fixture(scope="module")
def make(tokenizer, chat_template):
    def made(template: str, name: str = "qwen3", **kwargs) -> Renderer:
        return Renderer(tokenizer(name), chat_template=chat_template(template), **kwargs)

    return made


@pytest.fixture(scope="module")
def qwen3(make):
    return make("Qwen-Qwen3-0.6B")


def encode(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def full_render(tokenizer, template: str, messages, tools=(), **kwargs) -> str:
    """The whole conversation as transformers renders it: the reference."""
    return tokenizer.apply_chat_template(
        [message.to_chat() for message in messages],
        chat_template=template,
        tools=[tool.to_chat() for tool in tools] or None,
        tokenize=False,
        **{"add_generation_prompt": True, **kwargs},
    )


# -- openings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tools", [(), TOOLS])
@pytest.mark.parametrize("template", ["Qwen-Qwen3-0.6B", "Qwen3.5-4B", "Qwen3-Coder", "GLM-4.6"])
def test_an_opening_is_the_templates_own_rendering(template, tools, make, tokenizer, chat_template) -> None:
    """Byte for byte what transformers writes, encoded once."""
    opening = make(template).opening([SYSTEM, USER], tools)
    reference = full_render(tokenizer("qwen3"), chat_template(template), [SYSTEM, USER], tools)
    assert opening.tolist() == encode(tokenizer("qwen3"), reference)
    assert opening.dtype == np.int32
    assert not opening.flags.writeable


def test_bos_is_written_once(make) -> None:
    """The template writes it, so the tokenizer must not."""
    opening = make("deepseek-ai-DeepSeek-V3.1", "deepseek_v3").opening([USER])
    assert opening.tolist().count(0) == 1
    assert opening[0] == 0


def test_a_group_of_siblings_renders_once(make) -> None:
    """The same messages and tools are encoded once, also when many threads ask at once."""
    renderer = make("Qwen-Qwen3-0.6B")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        openings = list(pool.map(lambda _: renderer.opening([Message(*("user", "What?"))], TOOLS), range(32)))
    assert renderer.encoded_tokens == len(openings[0])
    assert all(opening is openings[0] for opening in openings)


def test_an_opening_that_the_template_refuses_names_the_template_and_the_reason(make) -> None:
    """It raises a ConfigError on each call."""
    renderer = make("Qwen3.5-4B")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"chat template .*No user query found"):
            renderer.opening([SYSTEM])


def test_one_date_for_the_whole_life_of_a_renderer(make) -> None:
    """``strftime_now`` in a template formats the renderer's ``moment``."""
    moment = datetime.datetime(2031, 2, 3)
    renderer = make("openai-gpt-oss-120b", "gptoss", moment=moment)
    assert "Current date: 2031-02-03" in renderer.decode(renderer.opening([USER]))


def test_template_switches_reach_openings_and_bridges(make) -> None:
    """``enable_thinking=False`` closes the thinking block in every prompt."""
    renderer = make("Qwen-Qwen3-0.6B", template_kwargs={"enable_thinking": False})
    closed = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert renderer.decode(renderer.opening([USER])).endswith(closed)
    assert renderer.decode(renderer.bridge([USER, FINAL], [USER], tail=[151645])).endswith(closed)


# -- bridges ----------------------------------------------------------------------------------------------------------


def test_golden_bridge_qwen3_user(qwen3, tokenizer) -> None:
    """After the sampled ``<|im_end|>``: newline, the user's turn, the assistant's header."""
    bridge = qwen3.bridge([SYSTEM, USER, FINAL], [Message("user", "More?")], tail=[151645])
    words = encode(tokenizer("qwen3"), "More?")
    assert bridge.tolist() == [198, 151644, 872, 198, *words, 151645, 198, 151644, 77091, 198]


def test_golden_bridge_qwen3_tools(qwen3, tokenizer) -> None:
    """Two results stand in one user turn."""
    second = Message("tool", "4", tool_call_id="call00002", name="add")
    history = [SYSTEM, USER, Message("assistant", tool_calls=(CALL, ToolCall("add", {}, id="call00002")))]
    bridge = qwen3.bridge(history, [RESULT, second], tools=TOOLS, tail=[151645])
    three, four = [*encode(tokenizer("qwen3"), "3"), 198], [*encode(tokenizer("qwen3"), "4"), 198]
    results = [151665, 198, *three, 151666, 198, 151665, 198, *four, 151666]
    assert bridge.tolist() == [198, 151644, 872, 198, *results, 151645, 198, 151644, 77091, 198]


def test_golden_bridge_deepseek_tools(make, tokenizer) -> None:
    """The output between its marks and nothing after: the reply continues without a header."""
    renderer = make("deepseek-ai-DeepSeek-V3.1", "deepseek_v3")
    bridge = renderer.bridge([USER, CALLING], [RESULT], tools=TOOLS, tail=[5, 1])
    words = encode(tokenizer("deepseek_v3"), "3")
    assert bridge.tolist() == [128812, *words, 128813]


def test_golden_bridge_deepseek_user(make, tokenizer) -> None:
    """The user's mark, the text, the assistant's mark, and the closed thinking block of this template."""
    renderer = make("deepseek-ai-DeepSeek-V3.1", "deepseek_v3")
    bridge = renderer.bridge([USER, FINAL], [Message("user", "More?")], tail=[5, 1])
    thinking = encode(tokenizer("deepseek_v3"), "<think></think>")
    assert bridge.tolist() == [128803, *encode(tokenizer("deepseek_v3"), "More?"), 128804, *thinking]


HARMONY = {"stop_token_ids": [200002, 199999, 200012]}


def test_golden_bridge_gptoss_tools(make, tokenizer) -> None:
    """``<|call|>`` was sampled; the result is addressed by the name of the call."""
    renderer = make("openai-gpt-oss-120b", "gptoss", **HARMONY)
    bridge = renderer.bridge([USER, CALLING], [RESULT], tools=TOOLS, tail=[200012])
    middle = encode(tokenizer("gptoss"), "functions.add to=assistant<|channel|>commentary<|message|>" + json.dumps("3"))
    assert bridge.tolist() == [200006, *middle, 200007, 200006, 173781]


def test_golden_bridge_gptoss_user(make, tokenizer) -> None:
    """``<|return|>`` was sampled, the template writes ``<|end|>``: the sampled one stays, the other is dropped."""
    renderer = make("openai-gpt-oss-120b", "gptoss", **HARMONY)
    bridge = renderer.bridge([USER, FINAL], [Message("user", "More?")], tail=[200002])
    expected = encode(tokenizer("gptoss"), "<|start|>user<|message|>More?<|end|><|start|>assistant")
    assert bridge.tolist() == expected
    cut = renderer.bridge([USER, FINAL], [Message("user", "More?")], tail=[11])
    assert cut.tolist() == [200007, *expected]


def test_without_the_stop_token_of_calls_gptoss_is_refused(make) -> None:
    """Nothing is guessed: the tokenizer does not declare ``<|call|>``."""
    renderer = make("openai-gpt-oss-120b", "gptoss", stop_token_ids=[200002])
    with pytest.raises(ConfigError, match="stop_token_ids"):
        renderer.self_test(TOOLS).raise_if_refused()


def test_a_cut_reply_gets_its_closing_mark_from_the_bridge(qwen3) -> None:
    """Without a sampled stop token the bridge begins with it; with one it does not."""
    history, new = [USER, FINAL], [Message("user", "More?")]
    stopped = qwen3.bridge(history, new, tail=[40, 151645])
    cut = qwen3.bridge(history, new, tail=[40])
    nothing = qwen3.bridge(history, new, tail=[])
    assert cut.tolist() == nothing.tolist() == [151645, *stopped.tolist()]


def test_a_sampled_stop_token_that_the_template_does_not_write_stays(make) -> None:
    """``<|endoftext|>`` was sampled where the template has ``<|im_end|>``: one mark is enough."""
    renderer = make("Qwen-Qwen3-0.6B", stop_token_ids=[151645, 151643])
    history, new = [USER, FINAL], [Message("user", "More?")]
    usual = renderer.bridge(history, new, tail=[151645])
    assert renderer.bridge(history, new, tail=[151643]).tolist() == usual.tolist()


GLM_MARKS = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")


def test_a_family_without_closing_marks_shares_the_header_with_the_sampled_stop(tokenizer, chat_template) -> None:
    """GLM: the sampled stop token is the next header. If it is another header, nothing is dropped."""
    glm = tokenizer("qwen3", *GLM_MARKS)
    end, user, observation = glm.convert_tokens_to_ids(["<|endoftext|>", "<|user|>", "<|observation|>"])
    renderer = Renderer(glm, chat_template=chat_template("GLM-4.6"), stop_token_ids=[end, user, observation])
    whole = "<|observation|>\n<tool_response>\n3\n</tool_response><|assistant|>"
    for tail, expected in ((observation, whole.removeprefix("<|observation|>")), (user, whole), (40, whole)):
        bridge = renderer.bridge([USER, CALLING], [RESULT], tools=TOOLS, tail=[tail])
        assert renderer.decode(bridge) == expected


def test_spelling_of_the_reply_changes_nothing_in_the_bridge(qwen3, tokenizer) -> None:
    """A reply tokenized letter by letter: the bridge depends only on its last id."""
    raw = tokenizer("qwen3").backend_tokenizer
    canonical = encode(tokenizer("qwen3"), "The answer is 3.")
    pieces = [i for letter in "The answer is 3." for i in raw.encode(letter, add_special_tokens=False).ids]
    assert pieces != canonical
    bridges = [qwen3.bridge([USER, FINAL], [USER], tail=[*ids, 151645]).tolist() for ids in (canonical, pieces)]
    assert bridges[0] == bridges[1]


def test_a_bridge_costs_the_same_however_long_the_history_is(qwen3) -> None:
    """Only the new text is encoded."""
    costs = []
    for turns in (1, 200):
        history = [SYSTEM, *([USER, FINAL] * turns)]
        before = qwen3.encoded_tokens
        bridge = qwen3.bridge(history, [USER], tail=[151645])
        costs.append(qwen3.encoded_tokens - before)
    assert costs == [len(bridge) + 1] * 2


def test_text_of_a_result_that_looks_like_the_sentinel_is_kept(qwen3) -> None:
    """The bridge contains the whole text of any tool result."""
    text = "qz7sentinelqz7 and qz7sentinelqz7z"
    bridge = qwen3.bridge([USER, CALLING], [Message("tool", text, tool_call_id=CALL.id)], tools=TOOLS, tail=[151645])
    assert text in qwen3.decode(bridge)


def test_results_and_a_user_message_in_one_batch(qwen3) -> None:
    """All messages since the reply are rendered together."""
    text = qwen3.decode(qwen3.bridge([USER, CALLING], [RESULT, Message("user", "Go on.")], tools=TOOLS, tail=[151645]))
    assert text.index("<tool_response>\n3") < text.index("<|im_start|>user\nGo on.<|im_end|>")


def test_a_bridge_of_nothing_is_refused(qwen3) -> None:
    """There is nothing to reply to."""
    with pytest.raises(ConfigError, match=r"bridge\.new"):
        qwen3.bridge([USER, FINAL], [], tail=[151645])


def test_a_system_message_that_the_template_moves_is_refused(make, qwen3) -> None:
    """Qwen writes it in place; DeepSeek moves it to the front, where it would be lost."""
    late = Message("system", "Now in French.")
    assert "Now in French." in qwen3.decode(qwen3.bridge([USER, FINAL], [late, USER], tail=[151645]))
    with pytest.raises(ConfigError, match="system message"):
        make("deepseek-ai-DeepSeek-V3.1", "deepseek_v3").bridge([USER, FINAL], [late, USER], tail=[1])


def test_a_template_with_a_switch_gets_a_dummy_with_a_round_of_tools(make) -> None:
    """R1 writes the first result of a conversation differently from the later ones; so does its bridge."""
    renderer = make("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "deepseek_v3")
    first = renderer.decode(renderer.bridge([USER, CALLING], [RESULT], tools=TOOLS, tail=[1]))
    later = renderer.decode(renderer.bridge([USER, CALLING, RESULT, CALLING], [RESULT], tools=TOOLS, tail=[1]))
    assert first == "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>3<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"
    assert later == "\n<｜tool▁output▁begin｜>3<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"


# -- whole conversations ----------------------------------------------------------------------------------------------

TEXT = st.text(max_size=40).filter(lambda text: "<" not in text)
CONTENT = TEXT.map(str.strip).filter(bool)
ARGUMENTS = st.dictionaries(st.sampled_from("abc"), st.integers() | TEXT | st.none() | st.lists(st.booleans()))


@st.composite
def steps(draw):
    """A reply, the messages that answer it, and whether the reply was cut."""
    calls = draw(st.lists(ARGUMENTS, max_size=3))
    content = draw(CONTENT) if not calls else draw(st.just("") | CONTENT)
    names = st.sampled_from(["add", "divide"])
    tool_calls = tuple(ToolCall(draw(names), arguments, id=f"c{n}") for n, arguments in enumerate(calls))
    results = [Message("tool", draw(TEXT), tool_call_id=call.id, name=call.name) for call in tool_calls]
    reply = Message("assistant", content, tool_calls=tool_calls)
    return reply, results or [Message("user", draw(TEXT))], draw(st.booleans())


def text_of(reply: Message) -> str:
    """The reply as a model of the Qwen family writes it."""
    calls = [
        f'<tool_call>\n{{"name": "{c.name}", "arguments": {json.dumps(c.arguments, ensure_ascii=False)}}}\n</tool_call>'
        for c in reply.tool_calls
    ]
    return "\n".join(([reply.content] if reply.content else []) + calls)


@pytest.mark.parametrize("template", STABLE)
@hypothesis.given(system=st.none() | CONTENT, user=TEXT, turns=st.lists(steps(), min_size=1, max_size=5))
@hypothesis.settings(
    max_examples=30, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
def test_opening_replies_and_bridges_are_the_templates_rendering(
    template, make, tokenizer, chat_template, system, user, turns
) -> None:
    """On a stable template, the ids appended step by step equal the encoding of the whole conversation.

    With parallel calls and results, several user turns, Unicode and cut replies.
    """
    renderer, reference = make(template), tokenizer("qwen3")
    messages = ([] if system is None else [Message("system", system)]) + [Message("user", user)]
    ids = renderer.opening(messages, TOOLS).tolist()
    for reply, new, cut in turns:
        sampled = encode(reference, text_of(reply)) + ([] if cut else [151645])
        messages.append(reply)
        bridge = renderer.bridge(messages, new, tools=TOOLS, tail=sampled).tolist()
        messages.extend(new)
        assert len(bridge) < 60 + 20 * sum(len(message.content) + 4 for message in new)
        ids = ids + sampled + bridge
    assert ids == encode(reference, full_render(reference, chat_template(template), messages, TOOLS))


@pytest.mark.parametrize("template", STABLE)
@hypothesis.given(turns=st.lists(steps(), min_size=1, max_size=2))
@hypothesis.settings(
    max_examples=30, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
def test_parse_reads_replies_back(template, make, tokenizer, turns) -> None:
    """Parsing returns the content and the calls of the reply."""
    renderer = make(template)
    for reply, _, cut in turns:
        tokens = encode(tokenizer("qwen3"), text_of(reply)) + ([] if cut else [151645])
        parsed = renderer.parse(tokens, tools=TOOLS)
        content = renderer.decode(encode(tokenizer("qwen3"), reply.content))  # the tokenizer normalises to NFC
        assert (parsed.content, parsed.reasoning) == (content, None)
        assert [call.name for call in parsed.tool_calls] == [call.name for call in reply.tool_calls]
        assert all(call.error is None for call in parsed.tool_calls)


# -- parsing ----------------------------------------------------------------------------------------------------------


def test_parse_drops_the_stop_token_and_keeps_other_marks(qwen3, tokenizer) -> None:
    """One stop token at the end is not content; all other sampled tokens are."""
    ids = encode(tokenizer("qwen3"), "Hi<|im_start|>")
    assert qwen3.parse([*ids, 151645]).content == "Hi<|im_start|>"
    assert qwen3.parse(np.array(ids, np.int32)).content == "Hi<|im_start|>"
    assert qwen3.parse([]).content == ""


def test_parse_sees_in_the_prompt_whether_it_opened_a_thought(make, tokenizer) -> None:
    """A reply cut inside a thinking block that the prompt opened is reasoning, without calls."""
    renderer = make("Qwen3.5-4B")
    ids = encode(tokenizer("qwen3"), "<tool_call>\n<function=add>\n</function>\n</tool_call>")
    thought = renderer.parse(ids, prompt=renderer.opening([USER], TOOLS), tools=TOOLS)
    assert (thought.content, thought.tool_calls) == ("", ())
    assert "function=add" in (thought.reasoning or "")


# -- construction ----------------------------------------------------------------------------------------------------


def test_stop_tokens_come_from_generation_config_and_the_tokenizer(small_tokenizer_folder, tmp_path) -> None:
    """One id or a list of them, then the tokenizer's EOS; none twice."""
    folder = shutil.copytree(small_tokenizer_folder("qwen2_5"), tmp_path / "model")
    own = load_tokenizer(folder)
    end, text = own.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert Renderer(own).stop_token_ids == (end,)
    for declared in ([text, end], text):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": declared}), encoding="utf-8")
        assert Renderer(load_tokenizer(folder)).stop_token_ids == (text, end)


def test_the_repr_of_a_renderer(qwen3) -> None:
    """Dialect and stop tokens; and the size of the vocabulary."""
    assert "dialect hermes, stops at 151645 '<|im_end|>'" in repr(qwen3)
    assert qwen3.vocab_size == 151669


@pytest.mark.parametrize("kind", ["missing folder", "empty folder", "name of nothing"])
def test_a_tokenizer_that_does_not_load_is_a_config_error(kind, tmp_path, monkeypatch) -> None:
    """The message has the requested name and what was expected."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    empty = tmp_path / "empty"
    empty.mkdir()
    requested = {"missing folder": tmp_path / "none", "empty folder": empty, "name of nothing": str(tmp_path / "no")}[
        kind
    ]
    with pytest.raises(ConfigError, match=r"tokenizer: .*expected a folder with tokenizer\.json") as caught:
        load_tokenizer(requested)
    assert str(requested) in str(caught.value)


def test_the_error_names_the_wrong_option(tokenizer, chat_template) -> None:
    """No template, no such dialect, no such strategy, a template that does not compile, no stop token."""
    good = {"chat_template": chat_template("Qwen-Qwen3-0.6B")}
    with pytest.raises(ConfigError, match="chat_template"):
        Renderer(tokenizer("gptoss"))
    with pytest.raises(ConfigError, match="dialect: got 'klingon'"):
        Renderer(tokenizer("qwen3"), dialect="klingon", **good)
    with pytest.raises(ConfigError, match="strategy"):
        Renderer(tokenizer("qwen3"), strategy="hope", **good)
    with pytest.raises(ConfigError, match="does not compile"):
        Renderer(tokenizer("qwen3"), chat_template="{% if %}")
    with pytest.raises(ConfigError, match="stop_token_ids"):
        Renderer(tokenizer("qwen3"), stop_token_ids=[], **good)


def test_one_shared_renderer_for_one_tokenizer(small_tokenizer_folder) -> None:
    """By tokenizer and by path; other options create another one; it is freed with its tokenizer."""
    folder = small_tokenizer_folder("qwen3")
    assert renderer_for(folder) is renderer_for(folder)
    own = load_tokenizer(folder)
    shared = renderer_for(own)
    assert shared is renderer_for(own)
    assert shared is not renderer_for(own, template_kwargs={"enable_thinking": False})
    assert shared is not renderer_for(folder)
    gone = weakref.ref(shared)
    del own, shared
    gc.collect()
    assert gone() is None


def test_importing_the_renderer_loads_no_transformers() -> None:
    """Nor torch: both take seconds."""
    code = "import sys, rollouts.renderer; sys.exit(bool({'transformers', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- the self-test ----------------------------------------------------------------------------------------------------

PROBE = [Tool("look", "Looks."), Tool("leap", "Leaps.")]
ALL_EXACT = ["exact"] * 5
VERDICTS = {
    # opening, tools first round, tools next round, user after tools, user again
    "Qwen-Qwen2.5-7B-Instruct": ALL_EXACT,
    "Qwen-Qwen3-0.6B": ["exact", "exact", "exact", "forks", "forks"],
    "Qwen-QwQ-32B": ["exact", "forks", "forks", "forks", "forks"],
    "Qwen3-Coder": ALL_EXACT,
    "Qwen3.5-4B": ["exact", "exact", "exact", "forks", "forks"],
    "trl-qwen3_instruct_2507": ALL_EXACT,
    "trl-qwen3_training": ALL_EXACT,
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ["exact", "exact", "forks", "forks", "exact"],
    "HuggingFaceTB-SmolLM3-3B": ["exact", "forks", "forks", "exact", "exact"],
    "GLM-4.6": ["exact", "exact", "exact", "forks", "forks"],
    "ibm-granite-granite-4.0": ALL_EXACT,
    "microsoft-Phi-3.5-mini-instruct": ["exact", "refused", "refused", "exact", "exact"],
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ["exact", "forks", "forks", "exact", "forks"],
    "deepseek-ai-DeepSeek-V3.1": ALL_EXACT,
    "deepseek-ai-DeepSeek-V3.2": ["exact", "forks", "forks", "forks", "forks"],
    "hfcfg-deepseek_v3": ["exact", "forks", "forks", "exact", "exact"],
    "openai-gpt-oss-120b": ["exact", "exact", "exact", "forks", "forks"],
}
STANDINS = {
    "GLM-4.6": (GLM_MARKS, ("<|endoftext|>", "<|user|>", "<|observation|>")),
    "ibm-granite-granite-4.0": (("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"), ("<|end_of_text|>",)),
    "microsoft-Phi-3.5-mini-instruct": (("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), ("<|end|>",)),
    "openai-gpt-oss-120b": ((), ("<|return|>", "<|endoftext|>", "<|call|>")),
}


@pytest.fixture(scope="module")
def judged(tokenizer, chat_template):
    def made(template: str) -> Renderer:
        name = "deepseek_v3" if "deepseek" in template.lower() else "gptoss" if "gpt-oss" in template else "qwen3"
        marks, stops = STANDINS.get(template, ((), ()))
        found = tokenizer(name, *marks)
        ids = found.convert_tokens_to_ids(list(stops)) if stops else None
        return Renderer(found, chat_template=chat_template(template), stop_token_ids=ids)

    return made


@pytest.mark.parametrize("template", VERDICTS)
def test_verdicts_of_the_self_test(template, judged) -> None:
    """The verdict on each step: exact, forks or refused."""
    found = judged(template).self_test(PROBE)
    assert [step.verdict for step in found.steps] == VERDICTS[template], str(found)


@pytest.mark.parametrize("template", sorted(set(VERDICTS) - {"NousResearch-Hermes-3-Llama-3.1-8B-tool_use"}))
def test_without_tools_no_template_is_refused(template, judged) -> None:
    """Also Phi, which only loses tool messages."""
    found = judged(template).self_test()
    found.raise_if_refused()
    assert len(found.steps) == 3


def test_a_refusal_names_template_step_and_reason(judged) -> None:
    """Phi leaves tool messages out, and the self-test reports it before the run."""
    found = judged("microsoft-Phi-3.5-mini-instruct").self_test(PROBE)
    with pytest.raises(ConfigError, match=r"chat template .*'tools, first round.*leaves out tool messages"):
        found.raise_if_refused()
    assert "refused" in str(found)


def test_a_template_that_hides_the_tools_is_noted(judged) -> None:
    """SmolLM3's template writes no tools into the prompt."""
    assert "does not tell the model of its tools" in str(judged("HuggingFaceTB-SmolLM3-3B").self_test(PROBE))
    assert judged("Qwen-Qwen3-0.6B").self_test(PROBE).notes == ()


def test_a_template_without_system_prompts_is_tested_without_one(tokenizer) -> None:
    """If the caller passes a system prompt, the template is refused."""
    source = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    renderer = Renderer(tokenizer("qwen3"), chat_template=source)
    assert renderer.self_test().verdict == "exact"
    with pytest.raises(ConfigError, match="no system"):
        renderer.self_test(system="Be brief.").raise_if_refused()


def test_the_self_test_is_cached_and_costs_no_counted_tokens(make) -> None:
    """One test for one set of tools; the counters count only tokens of conversations."""
    renderer = make("Qwen-Qwen3-0.6B")
    assert renderer.self_test(PROBE) is renderer.self_test(list(PROBE))
    assert renderer.encoded_tokens == 0


def test_a_bridge_that_is_not_the_templates_own_is_refused(tokenizer) -> None:
    """A template that numbers its turns: a short dummy has other numbers."""
    source = (
        "{% for m in messages %}<|im_start|>{{ loop.index }} {{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with pytest.raises(ConfigError, match="the template writes"):
        Renderer(tokenizer("qwen3"), chat_template=source).self_test().raise_if_refused()


def test_the_vocabulary_is_the_models(small_tokenizer_folder, tmp_path) -> None:
    """As its config.json declares; an id that only the tokenizer has would crash the server."""
    folder = shutil.copytree(small_tokenizer_folder("qwen3"), tmp_path / "model")
    own = len(load_tokenizer(folder))
    assert Renderer(load_tokenizer(folder)).vocab_size == own
    for config, expected in [
        ({"vocab_size": own + 267}, own + 267),
        ({"vocab_size": 5}, 5),
        ({"text_config": {"vocab_size": own + 1}}, own + 1),
    ]:
        (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", **config}))
        assert Renderer(load_tokenizer(folder)).vocab_size == expected


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}CALLS{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_stop_token_that_the_template_does_not_write_is_noted(tokenizer) -> None:
    """The list of stop tokens is incomplete, or the history has another token than the sampled one."""
    renderer = Renderer(tokenizer("qwen3"), chat_template=CHATML, stop_token_ids=[151643])
    (note,) = renderer.self_test().notes
    assert "ends a reply with '<|im_end|>" in note
    assert "the stop tokens are <|endoftext|>: are these all?" in note
    assert Renderer(tokenizer("qwen3"), chat_template=CHATML).self_test().notes == ()


def test_one_call_a_turn_is_noted(tokenizer) -> None:
    """The note names the limit that enforces it."""
    refusing = CHATML.replace("CALLS", "<tool_call>{{ c.function | tojson }}</tool_call>")
    refusing = (
        "{% for m in messages if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endfor %}"
        + refusing
    )
    found = Renderer(tokenizer("qwen3"), chat_template=refusing).self_test(PROBE)
    assert found.verdict == "exact"
    assert any("max_parallel_calls is 1" in note for note in found.notes)


def test_a_turn_of_one_call_is_judged_with_one_of_two(judged) -> None:
    """DeepSeek-V3 ends the reply only if it has two calls."""
    step = judged("hfcfg-deepseek_v3").self_test(PROBE).steps[1]
    assert (step.verdict, step.reason) == (
        "forks",
        "one call: history rewritten: no '<｜end▁of▁sentence｜>' ends the reply",
    )


def test_a_refusal_names_the_stop_token_that_is_missing(tokenizer) -> None:
    """It does not name tool results, which the dummy without calls would lose."""
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role != 'tool' %}{{ m.content }}{% endif %}"
        "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>"
        "{% for r in messages if r.role == 'tool' %}{{ r.content }}{% endfor %}{% endfor %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    renderer = Renderer(tokenizer("qwen3"), chat_template=source, stop_token_ids=[151643])
    with pytest.raises(ConfigError, match=r"a turn with calls: none of the stop tokens.*are stop_token_ids complete"):
        renderer.self_test(PROBE).raise_if_refused()


def test_content_is_a_list_of_parts_if_the_template_requires_it(tokenizer) -> None:
    """Otherwise it is text."""
    source = CHATML.replace("{{ m.content }}", "{% for p in m.content %}{{ p.type }}:{{ p.text }}{% endfor %}")
    renderer = Renderer(tokenizer("qwen3"), chat_template=source)
    assert renderer.decode(renderer.opening([USER])) == (
        "<|im_start|>user\ntext:What is 1 + 2?<|im_end|>\n<|im_start|>assistant\n"
    )
    renderer.self_test().raise_if_refused()
