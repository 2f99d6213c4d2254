"""Audits of dumps in the forms of other systems: planted defects are found, and sound dumps raise no alarm."""

from __future__ import annotations

import functools
import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from rollouts.audit import CHECKS, AuditReport, Weights, audit, reader_of  # noqa: E402
from rollouts.commands import main  # noqa: E402
from rollouts.engine import DEMO_MODEL  # noqa: E402
from rollouts.errors import ConfigError  # noqa: E402
from rollouts.integrations.slime import write_debug_data  # noqa: E402
from tests.audit.dumps import (  # noqa: E402
    Dump,
    encode,
    logprobs,
    model_tokens,
    of_gym,
    of_nemo,
    of_slime,
    of_traces,
    write_lines,
)
from tests.trainer_samples import scored_groups  # noqa: E402

Defect = Callable[[Dump], Any]


def write(folder: Path, form: str, rows: Dump) -> Path:
    if form != "slime-pt":
        return write_lines(folder / "traces.jsonl", rows)
    torch.save({"rollout_id": 0, "samples": rows}, folder / "0.pt")
    return folder / "0.pt"


def audited(folder: Path, form: str, rows: Dump, *, weights: bool = False) -> AuditReport:
    path = write(folder, form, rows)
    model = Weights(DEMO_MODEL, None, 1.0) if weights else None
    return audit(path, reader_of(form), model_tokens=model_tokens(), weights=model)


@functools.cache
def text_of(make: Callable[[], Dump]) -> str:
    return json.dumps(make())


def found(report: AuditReport) -> set[str]:
    return {f"{finding.kind} {finding.check}" for finding in report.findings}


def change(row: int, name: str, value: Any) -> Defect:
    """A defect of one field; a function is applied to its value."""

    def plant(rows: Dump) -> None:
        old = rows[row][name]
        rows[row][name] = value(old) if callable(value) else value

    return plant


def at(position: int, value: Any) -> Callable[[list[Any]], list[Any]]:
    """The list with another value at a position."""

    def changed(values: list[Any]) -> list[Any]:
        position_here = position % len(values)
        return [*values[:position_here], value, *values[position_here + 1 :]]

    return changed


def slime_mask(rows: Dump, mask: list[int]) -> None:
    rows[5]["loss_mask"] = mask
    width = len(mask)
    tokens = rows[5]["tokens"]
    full = [0] * (len(tokens) - width) + mask
    rows[5]["rollout_log_probs"] = logprobs(tokens, full)[-width:]


def header_trained(rows: Dump) -> None:
    """The mask of the second reply begins with its header."""
    mask = list(rows[5]["loss_mask"])
    second = len(mask) - mask[::-1].index(0)
    slime_mask(rows, [*mask[: second - 2], 1, 1, *mask[second:]])


def shifted(rows: Dump) -> None:
    """Mask and logprobs begin and end one token late."""
    mask = rows[5]["loss_mask"]
    slime_mask(rows, [0, *mask[:-1]])


def end_not_trained(rows: Dump) -> None:
    mask = rows[5]["loss_mask"]
    slime_mask(rows, [*mask[: mask.index(0) - 1], 0, *mask[mask.index(0) :]])


def padding_trained(rows: Dump) -> None:
    row, pad = rows[5], encode("<|im_end|>") * 3
    row["tokens"] = row["tokens"] + pad
    row["response_length"] += 3
    row["response"] += "<|im_end|>" * 3
    slime_mask(rows, row["loss_mask"] + [1, 1, 1])


def two_branches(rows: Dump) -> None:
    """The first reply is also the only one of a second branch."""
    row = dict(rows[5])
    first = row["loss_mask"].index(0)
    cut = len(row["tokens"]) - row["response_length"] + first
    row |= {"tokens": row["tokens"][:cut], "response_length": first, "loss_mask": [1] * first}
    row |= {"rollout_log_probs": row["rollout_log_probs"][:first], "response": "", "status": "truncated"}
    rows.insert(6, row)


def cut_reply(rows: Dump) -> None:
    for name in ("tokens", "loss_mask", "rollout_log_probs"):
        rows[5][name] = rows[5][name][:-3]
    rows[5] |= {"response_length": rows[5]["response_length"] - 3, "response": ""}


SLIME: dict[str, tuple[Defect, str]] = {
    "tool result trained": (lambda rows: slime_mask(rows, [1] * rows[5]["response_length"]), "broken roles"),
    "header trained": (header_trained, "broken roles"),
    "end not trained": (end_not_trained, "unusual roles"),
    "mask shifted by one": (shifted, "broken roles"),
    "mask shifted by one, logprobs not": (change(5, "loss_mask", lambda old: [0, *old[:-1]]), "broken roles"),
    "logprob above 0": (change(5, "rollout_log_probs", at(0, 0.5)), "broken logprobs"),
    "logprob NaN": (change(5, "rollout_log_probs", at(0, math.nan)), "broken logprobs"),
    "logprobs all 0": (change(5, "rollout_log_probs", lambda old: [0.0] * len(old)), "unusual logprobs"),
    "text of other ids": (change(5, "response", "another text"), "broken text"),
    "failed as 0": (lambda rows: rows[5].update(status="failed", reward=0.0), "broken failures"),
    "aborted as 0": (lambda rows: rows[5].update(status="aborted", reward=0.0), "broken failures"),
    "reward NaN": (change(5, "reward", math.nan), "broken rewards"),
    "reward None": (change(5, "reward", None), "unusual rewards"),
    "group short": (lambda rows: rows.pop(5), "broken groups"),
    "row twice": (lambda rows: rows.insert(6, dict(rows[5])), "broken rows"),
    "reply trained in two branches": (two_branches, "broken once"),
    "id outside the vocabulary": (change(5, "tokens", at(3, 509)), "broken vocabulary"),
    "width of the mask": (change(5, "loss_mask", lambda old: old[:-1]), "broken mask"),
    "width of the logprobs": (change(5, "rollout_log_probs", lambda old: [*old, 0.0]), "broken mask"),
    "padding trained": (padding_trained, "broken roles"),
    "label of another group": (change(5, "label", "9"), "broken groups"),
    "prompt of another group": (change(5, "prompt", "What is 9?"), "broken groups"),
    "nothing trained": (lambda rows: slime_mask(rows, [0] * rows[5]["response_length"]), "unusual mask"),
    "mask value 2": (change(5, "loss_mask", at(0, 2)), "broken mask"),
    "cut reply called completed": (cut_reply, "unusual roles"),
}


def retokenised(rows: Dump) -> None:
    """A token of the first reply as the ids of its letters, with the logprobs as they were."""
    row = rows[5]
    before = len(row["tokens"]) - row["response_length"]
    codec = model_tokens().codec
    one = next(token for token in row["tokens"][before:] if token < 500 and len(codec.decode([token])) > 1)
    letters = [encode(letter)[0] for letter in codec.decode([one])]
    place = row["tokens"].index(one, before)
    row["tokens"] = [*row["tokens"][:place], *letters, *row["tokens"][place + 1 :]]
    for name, value in (("loss_mask", 1), ("rollout_log_probs", row["rollout_log_probs"][place - before])):
        column, here = row[name], place - before
        row[name] = [*column[:here], *[value] * len(letters), *column[here + 1 :]]
    row["response_length"] += len(letters) - 1


def thought_dropped(rows: Dump) -> None:
    """The first reply is a context without its thought; the second has the logprobs of the whole context."""
    row = rows[5]
    before = len(row["tokens"]) - row["response_length"]
    first = row["loss_mask"].index(0)
    start = len(encode("<think>\nadd 5\n</think>\n\n"))
    row["tokens"] = [*row["tokens"][:before], *row["tokens"][before + start :]]
    row["loss_mask"] = [0] * (first - start) + row["loss_mask"][first:]
    row["rollout_log_probs"] = [0.0] * (first - start) + row["rollout_log_probs"][first:]
    row |= {"response_length": row["response_length"] - start, "response": ""}


def shift_logprobs(old: list[float]) -> list[float]:
    trained = [value for value in old if value]
    rolled = iter([trained[-1], *trained[:-1]])
    return [next(rolled) if value else 0.0 for value in old]


def at_temperature(rows: Dump) -> None:
    row = rows[5]
    full = [0] * (len(row["tokens"]) - row["response_length"]) + row["loss_mask"]
    row["rollout_log_probs"] = logprobs(row["tokens"], full, 1.3)[-row["response_length"] :]


def swapped(rows: Dump) -> None:
    one, other = rows[4], rows[5]
    one["rollout_log_probs"], other["rollout_log_probs"] = other["rollout_log_probs"], one["rollout_log_probs"]


WITH_WEIGHTS: dict[str, Defect] = {
    "logprobs shifted": change(5, "rollout_log_probs", shift_logprobs),
    "temperature 1.3": at_temperature,
    "other weights": change(5, "rollout_log_probs", lambda old: [value * 1.05 for value in old]),
    "retokenised reply": retokenised,
    "context id changed": change(5, "tokens", at(3, 40)),
    "thought dropped": thought_dropped,
    "logprobs of two rows swapped": swapped,
}


def node(number: int, name: str, value: Any) -> Defect:
    def plant(rows: Dump) -> None:
        change(number, name, value)(rows[5]["traces"][0]["nodes"])

    return plant


def trace(**fields: Any) -> Defect:
    return lambda rows: rows[5]["traces"][0].update(fields)


def train_tool_result(rows: Dump) -> None:
    one = rows[5]["traces"][0]["nodes"][2]
    one |= {"mask": [True] * len(one["mask"]), "logprobs": [-0.5] * len(one["mask"])}


def train_header(rows: Dump) -> None:
    one = rows[5]["traces"][0]["nodes"][3]
    one["logprobs"] = [-0.5] * one["mask"].count(False) + one["logprobs"]
    one["mask"] = [True] * len(one["mask"])


def shift_node(rows: Dump) -> None:
    one = rows[5]["traces"][0]["nodes"][1]
    one["mask"] = [False, *one["mask"][:-1]]
    one["logprobs"] = one["logprobs"][:-1]


TRACES: dict[str, tuple[Defect, str]] = {
    "tool result trained": (train_tool_result, "broken mask"),
    "header trained": (train_header, "broken roles"),
    "mask shifted by one": (shift_node, "unusual roles"),
    "message that was not sampled is trained": (node(1, "sampled", False), "broken mask"),
    "logprob above 0": (node(1, "logprobs", at(0, 0.5)), "broken logprobs"),
    "logprob null": (node(1, "logprobs", at(0, None)), "broken logprobs"),
    "logprobs all 0": (
        lambda rows: [node(number, "logprobs", lambda old: [0.0] * len(old))(rows) for number in (1, 3)],
        "unusual logprobs",
    ),
    "width of the logprobs": (node(1, "logprobs", lambda old: old[:-1]), "broken logprobs"),
    "width of the mask": (node(1, "mask", lambda old: old[:-1]), "broken mask"),
    "text of other ids": (node(3, "message", {"role": "assistant", "content": "other"}), "broken text"),
    "id outside the vocabulary": (node(1, "token_ids", at(-1, 509)), "broken vocabulary"),
    "parent of a later node": (node(1, "parent", 3), "broken rows"),
    "reward NaN": (trace(rewards={"correct": {"score": math.nan, "weight": 1.0}}), "broken rewards"),
    "no reward": (trace(rewards={}), "unusual rewards"),
    "trace twice": (lambda rows: rows.append(rows[5]), "broken rows"),
}


def call(number: int, name: str, value: Any) -> Defect:
    def plant(rows: Dump) -> None:
        calls = [item for item in rows[5]["response"]["output"] if "generation_token_ids" in item]
        change(number, name, value)(calls)

    return plant


def retokenise_prompt(rows: Dump) -> None:
    """The second request has a word of the first reply as letters."""
    first = next(item for item in rows[5]["response"]["output"] if "generation_token_ids" in item)
    start = len(first["prompt_token_ids"])
    call(1, "prompt_token_ids", lambda old: [*old[:start], *encode("<")[:1], *encode("t"), *old[start + 1 :]])(rows)


def drop_thought(rows: Dump) -> None:
    first = next(item for item in rows[5]["response"]["output"] if "generation_token_ids" in item)
    start = len(first["prompt_token_ids"])
    width = len(encode("<think>\nadd 5\n</think>\n\n"))
    call(1, "prompt_token_ids", lambda old: [*old[:start], *old[start + width :]])(rows)


CALLS: dict[str, tuple[Defect, str]] = {
    "retokenised reply": (retokenise_prompt, "broken requests"),
    "thought dropped": (drop_thought, "broken requests"),
    "width of the logprobs": (call(0, "generation_log_probs", lambda old: old[:-1]), "broken logprobs"),
    "logprob above 0": (call(0, "generation_log_probs", at(0, 0.5)), "broken logprobs"),
    "reward NaN": (change(5, "reward", math.nan), "broken rewards"),
    "failed as 0": (lambda rows: rows[5]["response"].update(error="server died"), "broken failures"),
    "id outside the vocabulary": (call(1, "generation_token_ids", at(0, 509)), "broken vocabulary"),
    "another conversation": (call(1, "prompt_token_ids", at(3, 40)), "unusual requests"),
    "group short": (lambda rows: rows.pop(5), "unusual groups"),
}


def column(name: str, value: Any) -> Defect:
    return change(5, name, lambda old: [value(old[0])])


def nemo_swapped(rows: Dump) -> None:
    one, other = rows[4], rows[5]
    one["generation_logprobs"], other["generation_logprobs"] = other["generation_logprobs"], one["generation_logprobs"]


NEMO: dict[str, tuple[Defect, str]] = {
    "padding trained": (column("token_loss_mask", lambda old: [*old[:-1], 1]), "broken mask"),
    "mask value 2": (column("token_loss_mask", lambda old: [2 * one for one in old]), "broken mask"),
    "width of the mask": (column("token_loss_mask", lambda old: old[:20]), "broken mask"),
    "logprob above 0": (column("generation_logprobs", lambda old: [-one for one in old]), "broken logprobs"),
    "logprob NaN": (column("generation_logprobs", lambda old: [math.nan] * len(old)), "broken logprobs"),
    "tool result trained": (
        lambda rows: rows[5].update(
            token_loss_mask=[[int(0 < at < rows[5]["input_lengths"][0]) for at in range(len(rows[5]["token_ids"][0]))]]
        ),
        "broken roles",
    ),
    "nothing trained": (column("token_loss_mask", lambda old: [0] * len(old)), "unusual mask"),
    "id outside the vocabulary": (column("token_ids", at(3, 509)), "broken vocabulary"),
    "reward NaN": (change(5, "rewards", [math.nan]), "broken rewards"),
    "logprobs shifted": (column("generation_logprobs", shift_logprobs), "unusual weights"),
    "logprobs of two rows swapped": (nemo_swapped, "unusual weights"),
    "stale weights": (column("generation_logprobs", lambda old: [2 * one for one in old]), "unusual weights"),
}

FORMS: dict[str, tuple[Callable[[], Dump], dict[str, tuple[Defect, str]]]] = {
    "slime-pt": (of_slime, SLIME),
    "traces": (of_traces, TRACES),
    "calls": (of_gym, CALLS),
    "nemo-rl": (of_nemo, NEMO),
}
KINDS = [(form, name) for form, (_, defects) in FORMS.items() for name in defects]


@pytest.mark.parametrize(("form", "name"), KINDS)
def test_a_planted_defect_is_found(form: str, name: str, tmp_path: Path) -> None:
    """Each kind that a format lets one judge is found without weights, in its row, and only broken ones are not ok."""
    make, defects = FORMS[form]
    plant, expected = defects[name]
    rows = json.loads(text_of(make))
    plant(rows)
    report = audited(tmp_path, form, rows)
    assert expected in found(report)
    assert report.ok == (not any(one.startswith("broken") for one in found(report)))


@pytest.mark.parametrize("form", FORMS)
def test_a_sound_dump_raises_no_alarm(form: str, tmp_path: Path) -> None:
    """Nothing is broken or unusual, also against the weights, and every check is judged or has its reason."""
    report = audited(tmp_path, form, json.loads(text_of(FORMS[form][0])), weights=True)
    assert found(report) == set()
    assert report.rows == 12
    assert {check for check in CHECKS if not report.judged[check]} == set(report.reasons)


def test_a_dump_of_forked_rollouts_raises_no_alarm(tmp_path: Path) -> None:
    """Branches of one rollout have one number and another prompt; a reply of the first is context in the second."""
    path = write_debug_data(scored_groups(forks=True), tmp_path / "0.pt")
    report = audit(path, reader_of("slime-pt"))
    assert found(report) == set()
    assert report.judged["once"] == 8


@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_a_defect_that_only_weights_show(name: str, tmp_path: Path) -> None:
    """No alarm without them: the reason says so. With them, the position is named."""
    rows = json.loads(text_of(of_slime))
    WITH_WEIGHTS[name](rows)
    without = audited(tmp_path, "slime-pt", rows)
    assert found(without) == set()
    assert "--model" in without.reasons["weights"]
    report = audited(tmp_path, "slime-pt", rows, weights=True)
    assert found(report) == {"broken weights"}
    assert re.search(r"sample \d+ \(group 1 · index [45]\), position \d+", str(report.findings[0]))


class Bomb:
    """Runs code when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (self.path,))


def test_a_file_that_names_code_is_refused_by_that_name(tmp_path: Path) -> None:
    """Nothing of it runs."""
    rows = json.loads(text_of(of_slime))
    rows[3]["metadata"] = {"x": Bomb(str(tmp_path / "touched"))}
    path = write(tmp_path, "slime-pt", rows)
    with pytest.raises(ConfigError, match=r"names posix\.mkdir"):
        audit(path, reader_of("slime-pt"))
    assert not (tmp_path / "touched").exists()


def test_tensors_and_arrays_are_read_as_lists(tmp_path: Path) -> None:
    """Of torch and of numpy, in the dtypes of trainers."""
    import numpy as np

    rows = json.loads(text_of(of_slime))
    rows[0]["tokens"] = torch.tensor(rows[0]["tokens"])[None].repeat(2, 1)[1]
    rows[1]["loss_mask"] = np.array(rows[1]["loss_mask"])
    rows[2]["rollout_log_probs"] = torch.tensor(rows[2]["rollout_log_probs"], dtype=torch.float32)
    rows[3] |= {"teacher_log_probs": torch.ones(3, dtype=torch.bfloat16), "reward": np.float32(1.0)}
    report = audited(tmp_path, "slime-pt", rows)
    assert report.rows == 12
    assert found(report) == set()


def test_a_tensor_that_repeats_a_byte_without_end_is_refused(tmp_path: Path) -> None:
    """A stride of 0 lets some bytes claim any number of elements."""
    rows = json.loads(text_of(of_slime))
    rows[0]["loss_mask"] = torch.ones(1).expand(len(rows[0]["loss_mask"]))
    assert found(audited(tmp_path, "slime-pt", rows)) <= {"broken roles", "broken mask"}
    rows[0]["loss_mask"] = torch.ones(1).expand(1 << 40)
    with pytest.raises(ConfigError, match="ValueError: a tensor of"):
        audited(tmp_path, "slime-pt", rows)


def shared(depth: int) -> list[Any]:
    """A list that a file holds in a few bytes, and that has ``2 ** depth`` entries."""
    found: list[Any] = ["a"]
    for _ in range(depth):
        found = [found, found]
    return found


def cycle() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("prompt", shared(60), "more values than"),
        ("metadata", cycle(), "more values than"),
        ("label", 10**5000, "an integer of 16610 bits"),
        ("index", -(10**5000), "an integer of 16610 bits"),
    ],
    ids=["shared", "cycle", "label", "index"],
)
def test_a_value_that_is_larger_than_its_file_is_refused(field: str, value: Any, words: str, tmp_path: Path) -> None:
    """A few bytes of a pickle may stand for any amount of memory, and for a number that has no text."""
    rows = json.loads(text_of(of_slime))
    rows[3][field] = value
    with pytest.raises(ConfigError, match=words):
        audit(write(tmp_path, "slime-pt", rows), reader_of("slime-pt"))


@pytest.mark.parametrize(
    ("form", "field", "value", "expected"),
    [
        ("slime-pt", "response_length", 10**12, "broken mask"),
        ("slime-pt", "response_length", -(10**12), "broken mask"),
        ("slime-pt", "reward", 10**400, "broken rewards"),
        ("slime-pt", "reward", {"score": -(10**400)}, "broken rewards"),
        ("nemo-rl", "generation_logprobs", [], "broken rows"),
        ("nemo-rl", "prev_logprobs", [], "broken rows"),
        ("nemo-rl", "rewards", [], "broken rows"),
        ("nemo-rl", "input_lengths", [10**6], "broken mask"),
        ("nemo-rl", "input_lengths", [-1], "broken mask"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_number_that_no_system_writes_is_a_finding(
    form: str, field: str, value: Any, expected: str, tmp_path: Path
) -> None:
    """It ends neither the audit nor the memory."""
    rows = json.loads(text_of(FORMS[form][0]))
    rows[3] |= {field: value, **({"loss_mask": None} if field == "response_length" else {})}
    assert expected in found(audited(tmp_path, form, rows))


def test_a_text_that_a_dump_lacks_is_not_judged(tmp_path: Path) -> None:
    """A missing response is none, not an empty one."""
    rows = json.loads(text_of(of_slime))
    for row in rows:
        del row["response"]
    report = audited(tmp_path, "slime-pt", rows)
    assert report.judged["text"] == 0
    assert "text" in report.reasons


def test_groups_of_one_rollout_are_not_said_to_hold(tmp_path: Path) -> None:
    """There is nothing to compare."""
    rows = json.loads(text_of(of_slime))
    for number, row in enumerate(rows):
        row["group_index"] = number
    report = audited(tmp_path, "slime-pt", rows)
    assert report.reasons["groups"] == "each group of the dump has one rollout"


def agents(rows: Dump) -> Dump:
    """Three agents in each rollout, in any order; two of them are asked the same and reply the same."""
    found = []
    for number, row in enumerate(rows):
        names = {name: row[name] for name in ("group_index", "index", "rollout_id", "label")}
        third = {**rows[number - 1], **names, "prompt": "Judge this."}
        found += [third, row, dict(row)] if number % 2 else [row, dict(row), third]
    return found


def test_equal_replies_of_the_agents_of_a_rollout_are_unusual(tmp_path: Path) -> None:
    """Agents that are asked the same may reply the same: only a rollout without other rows is stored twice."""
    report = audited(tmp_path, "slime-pt", agents(of_slime()))
    assert found(report) == {"unusual rows"}
    assert report.unusual["rows"] == 12
    rows = agents(of_slime())
    rows += [dict(row, index=99, rollout_id=99) for row in rows[:1] * 2]
    assert audited(tmp_path, "slime-pt", rows).broken["rows"] == 1


def test_prompts_of_a_group_are_those_of_any_agent(tmp_path: Path) -> None:
    """The rows of a rollout may be in any order; a rollout without the prompt of its group is found."""
    rows = agents(of_slime())
    for row in rows[3:6]:
        row["prompt"] = "Another question."
    report = audited(tmp_path, "slime-pt", rows)
    (finding,) = [one for one in report.findings if one.kind == "broken"]
    assert str(finding) == (
        "broken, law 5 (groups): 0.pt, sample 3 (group 0 · index 1), prompt: got another prompt; expected that of "
        "0.pt, sample 0 (group 0 · index 0): one prompt a group"
    )


def test_a_file_with_the_rows_of_another_is_found(tmp_path: Path) -> None:
    """Rollouts are numbered by file; columns with logprobs are not sampled twice for a whole file."""
    rows = json.loads(text_of(of_slime))
    write(tmp_path, "slime-pt", rows)
    torch.save({"rollout_id": 1, "samples": rows}, tmp_path / "1.pt")
    torch.save({"rollout_id": 2, "samples": rows[:8]}, tmp_path / "2.pt")
    report = audit(tmp_path, reader_of("slime-pt"))
    assert [str(finding) for finding in report.findings] == [
        "broken, law 4 (rows): 1.pt: got the rows of another file; expected rows that 0.pt does not have"
    ]


@pytest.mark.parametrize("form", FORMS)
def test_a_file_of_another_format_is_an_error_before_any_judgement(form: str, tmp_path: Path) -> None:
    """It names the format's own form, and the exit code is that of bad input."""
    path = write_lines(tmp_path / "other.jsonl", [{"text": "hello"}])
    assert main(["audit", str(path), "--format", form]) == 2


def test_the_exit_code_is_1_for_broken_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Unusual values are printed."""
    rows = json.loads(text_of(of_slime))
    rows[5]["reward"] = None
    path = write(tmp_path, "slime-pt", rows)
    assert main(["audit", str(path), "--format", "slime-pt"]) == 0
    assert "unusual, law 4 (rewards)" in capsys.readouterr().out
    rows[5]["reward"] = math.inf
    write(tmp_path, "slime-pt", rows)
    assert main(["audit", str(path), "--format", "slime-pt", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["findings"][0]["place"] == "0.pt, sample 5 (group 1 · index 5), reward"
    assert report["checks"]["weights"]["cannot_judge"]


def test_texts_of_verl_are_not_judged_by_ids(tmp_path: Path) -> None:
    """The report says which laws cannot be judged, and the rest is judged."""
    rows: Dump = [
        {"input": f"q{n // 2}", "output": "a", "gts": "1", "score": 1.0, "step": 3, "uid": f"u{n // 2}"}
        for n in range(6)
    ]
    path = write_lines(tmp_path / "3.jsonl", rows)
    report = audit(path, reader_of("verl"))
    assert found(report) == set()
    assert {"text", "mask", "logprobs", "roles", "weights", "requests"} <= set(report.reasons)
    rows[2] |= {"score": math.nan}
    rows[3] |= {"input": "other", "output": ""}
    report = audit(write_lines(path, rows), reader_of("verl"))
    assert found(report) == {"broken rewards", "broken groups", "unusual rows"}


def test_advantages_of_trl_are_those_of_their_rewards(tmp_path: Path) -> None:
    """They sum to 0 in a group and order as its rewards; a reward of NaN is missing."""
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    def judged(advantages: list[float], last: float = 0.0, extra: float | None = None) -> set[str]:
        table = {"step": [1] * 4, "prompt": ["q"] * 4, "completion": list("abcd"), "correct": [1.0, 0.0, 1.0, last]}
        if extra is not None:
            table["second"] = [math.nan] * 3 + [extra]
        parquet.write_table(pyarrow.table({**table, "advantage": advantages}), tmp_path / "completions_1.parquet")
        return found(audit(tmp_path, reader_of("trl")))

    assert judged([0.87, -0.87, 0.87, -0.87]) == set()
    assert judged([0.87, -0.87, 0.87, 0.5]) == {"broken advantages"}
    assert judged([-0.87, 0.87, -0.87, 0.87]) == {"unusual advantages"}
    assert judged([math.nan] * 4) == {"broken advantages"}
    assert judged([0.87, -0.87, 0.87, -0.87], last=math.nan) == {"unusual rewards"}
    assert judged([0.87, -0.87, 0.87, -0.87], last=math.nan, extra=math.nan) == {"unusual rewards"}
    assert judged([0.87, -0.87, 0.87, -0.87], last=math.nan, extra=0.0) == set()


def test_the_first_group_of_a_log_of_the_last_rows_may_be_cut(tmp_path: Path) -> None:
    """After an evaluation, TRL's log has a part of the oldest group: that its advantages have a mean is unusual."""
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    def judged(*advantages: float) -> set[str]:
        table = {"step": [1] * 4, "prompt": list("qqrr"), "completion": list("abcd"), "correct": [1.0, 0.0] * 2}
        parquet.write_table(pyarrow.table({**table, "advantage": list(advantages)}), tmp_path / "completions_1.parquet")
        return found(audit(tmp_path, reader_of("trl")))

    assert judged(0.9, -0.1, 0.7, -0.7) == {"unusual advantages"}
    assert judged(0.7, -0.7, 0.9, -0.1) == {"broken advantages"}


def test_histories_of_harbor_and_rllm(tmp_path: Path) -> None:
    """A rewrite is broken where the calls of a history are joined, and unusual where each is trained alone."""
    calls = [item for item in json.loads(text_of(of_gym))[0]["response"]["output"] if "generation_token_ids" in item]
    prompts, replies, values = ([one[name] for one in calls] for name in list(calls[0])[2:])
    detail = {"prompt_token_ids": prompts, "completion_token_ids": replies, "logprobs": values}
    harbor = {"task_name": "t", "agent_result": {"rollout_details": [detail]}, "exception_info": None}
    harbor |= {"verifier_result": {"rewards": {"reward": 1.0}}, "id": "x"}
    path = tmp_path / "result.json"
    path.write_text(json.dumps(harbor))
    assert found(audit(path, reader_of("calls"))) == set()
    start = len(prompts[0])
    prompts[1] = [*prompts[1][:start], *prompts[1][start + 3 :]]
    path.write_text(json.dumps(harbor))
    assert found(audit(path, reader_of("calls"))) == {"broken requests"}
    steps = [
        {"prompt_ids": prompt, "response_ids": reply, "logprobs": one}
        for prompt, reply, one in zip(prompts, replies, values, strict=True)
    ]
    episode = {"id": "t:0", "trajectories": [{"steps": steps, "reward": 1.0}], "termination_reason": "env_done"}
    lines = write_lines(tmp_path / "episodes.jsonl", [episode])
    assert found(audit(lines, reader_of("calls"))) == {"unusual requests"}
