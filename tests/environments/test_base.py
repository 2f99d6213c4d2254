"""The protocol, and tools from methods: the schema the model reads is the signature that is called."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Literal

import PIL.Image
import pytest

from rollouts.dtypes import Content, Image, Message, Prompt, ToolCall
from rollouts.environments import Environment, StepResult, ToolEnvironment, ToolResult, tool
from rollouts.errors import ConfigError, EnvironmentFailure


class Shop(ToolEnvironment):
    system_prompt = "Be brief."

    def __init__(self) -> None:
        self.sold: list[str] = []

    @tool
    def buy(self, item: str, count: int = 1, *, gift: bool = False, size: Literal["s", "m"] | None = None) -> str:
        """Buy something.

        More words.
        """
        self.sold.append(item)
        return f"{count} {item}{' (gift)' if gift else ''}"

    @tool
    async def price(self, items: list[str]) -> float:
        """Ask for a price."""
        if not items:
            raise ValueError("no item")
        return 2.5 * len(items)

    @tool
    def crash(self) -> str:
        raise ConnectionError("the world is down")

    def not_a_tool(self) -> None: ...


def reply_with(*calls: ToolCall) -> Message:
    return Message("assistant", "", tool_calls=calls)


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name, arguments, id=f"id of {name}")


def test_tools_are_the_marked_methods_in_their_order() -> None:
    """Name, first line of the docstring, and the schema of the signature."""
    shop = Shop()
    assert isinstance(shop, Environment)
    assert [entry.name for entry in shop.tools] == ["buy", "price", "crash"]
    buy = shop.tools[0]
    assert buy.description == "Buy something."
    assert buy.parameters["type"] == "object"
    assert buy.parameters["required"] == ["item"]
    assert list(buy.parameters["properties"]) == ["item", "count", "gift", "size"]
    assert buy.parameters["properties"]["count"] == {"type": "integer", "default": 1}
    assert "title" not in buy.parameters
    assert shop.tools[1].parameters["properties"]["items"]["type"] == "array"


async def test_calls_are_answered_in_their_order() -> None:
    """One tool message for each, with its id and name; sync and async alike."""
    shop = Shop()
    result = await shop.step(reply_with(call("price", items=["a", "b"]), call("buy", item="a", gift=True)))
    assert [message.content for message in result.messages] == ["5.0", "1 a (gift)"]
    assert [message.tool_call_id for message in result.messages] == ["id of price", "id of buy"]
    assert {message.role for message in result.messages} == {"tool"}
    assert (result.done, result.metrics) == (False, {"tool_errors": 0})


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (call("buy"), "missing required field `item`"),
        (call("buy", item=3), "Expected `str`, got `int`"),
        (call("buy", item="a", count="3"), "Expected `int`, got `str`"),
        (call("buy", item="a", colour="red"), "unknown field `colour`"),
        (call("buy", item="a", size="xl"), "Invalid enum value"),
        (call("price", items=[]), "no item"),
    ],
)
async def test_what_the_model_did_wrong_is_reported_to_the_model(wrong: ToolCall, words: str) -> None:
    """As a message, counted; the other calls of the reply still run, and the episode continues."""
    shop = Shop()
    result = await shop.step(reply_with(wrong, call("buy", item="b")))
    assert result.messages[0].content.startswith("Error: ")
    assert words in result.messages[0].content
    assert result.messages[1].content == "1 b"
    assert (result.done, result.metrics) == (False, {"tool_errors": 1})
    assert shop.sold == ["b"]


async def test_what_the_world_did_wrong_is_raised() -> None:
    """It does not go to the model; the caller of the environment attributes it."""
    with pytest.raises(ConnectionError, match="the world is down"):
        await Shop().step(reply_with(call("crash")))


async def test_a_reply_without_calls_ends_the_episode() -> None:
    """Unless ``answer`` is overridden."""

    class Patient(Shop):
        async def answer(self, reply: Message) -> StepResult:
            return StepResult([Message("user", "go on")])

    assert (await Shop().step(Message("assistant", "bye"))).done
    assert not (await Patient().step(Message("assistant", "bye"))).done


async def test_an_answer_may_be_sync() -> None:
    """As ``start``, ``step`` and the tools may."""

    class Patient(Shop):
        def answer(self, reply: Message) -> StepResult:  # type: ignore[override]
            return StepResult(done=False)

    assert not (await Patient().step(Message("assistant", "bye"))).done


async def test_the_system_prompt_opens_once() -> None:
    """The prompt's own system message wins."""
    own = Prompt([Message("system", "Be long."), Message("user", "hi")])
    assert [message.content for message in await Shop().start(Prompt("hi"))] == ["Be brief.", "hi"]
    assert await Shop().start(own) == own.messages


async def test_a_system_prompt_may_be_computed_by_a_descriptor() -> None:
    """A cached property has no setter, as a method; only a function is taken for a property that was forgotten."""

    class Cached(ToolEnvironment):
        @functools.cached_property
        def system_prompt(self) -> str:
            return "Go."

    assert (await Cached().start(Prompt("why?")))[0].content == "Go."
    for kind in (lambda function: function, staticmethod, classmethod):
        with pytest.raises(ConfigError, match=r"Wrong\.system_prompt: got a method; expected a string, or a property"):
            type("Wrong", (ToolEnvironment,), {"system_prompt": kind(lambda self: "Go.")})


@pytest.mark.parametrize("name", ["snapshot", "restore"])
def test_a_tool_may_have_the_name_of_half_a_pair(name: str) -> None:
    """An episode calls ``snapshot`` and ``restore`` only of an environment that has both."""

    def named(self: Any) -> str:
        """Do it."""
        return "done"

    named.__name__ = name
    browser = type("Browser", (ToolEnvironment,), {name: tool(named)})
    assert [each.name for each in browser().tools] == [name]
    other = "restore" if name == "snapshot" else "snapshot"
    with pytest.raises(
        ConfigError, match=rf"Kept\.{name}: got a tool; expected another name: the episode calls {name}"
    ):
        type("Kept", (browser,), {other: lambda self, *rest: None})


def test_an_argument_without_a_type_is_refused() -> None:
    """By method and argument, as soon as the tools are looked at."""

    class Vague(ToolEnvironment):
        @tool
        def look(self, where) -> str:  # type: ignore[no-untyped-def]
            return ""

    with pytest.raises(ConfigError, match=r"look\(where\): got 'no annotation'; expected a type for each argument"):
        _ = Vague().tools


def test_an_argument_of_a_type_without_a_schema_is_refused() -> None:
    """By method, argument and type: a model writes JSON."""

    class Place:
        pass

    class Vague(ToolEnvironment):
        @tool
        def look(self, where: str, place: Place) -> str:
            return ""

    Vague.look.__annotations__["place"] = Place
    Vague.look.__annotations__["where"] = str
    with pytest.raises(ConfigError, match=r"look\(place\): got <class '.*Place'>; expected a type of JSON"):
        _ = Vague().tools


@pytest.mark.parametrize("kind", ["function", "static", "empty"])
def test_a_tool_without_self_is_refused(kind: str) -> None:
    """Its first argument would get the environment, and the model would not see that argument."""

    class Selfless(ToolEnvironment):
        if kind == "function":

            @tool
            def look(at: str, near: int) -> str:  # type: ignore[misc]  # noqa: N805
                return ""

        elif kind == "static":

            @tool
            @staticmethod
            def look(at: str, near: int) -> str:
                return ""

        else:

            @tool
            def look() -> str:  # type: ignore[misc]
                return ""

    with pytest.raises(ConfigError, match=r"look: got '\(.*\)'; expected self as the first argument"):
        _ = Selfless().tools


def test_a_description_in_the_decorator_is_refused() -> None:
    """The docstring of the method is the description."""
    with pytest.raises(ConfigError, match=r"@tool: got 'Look\.'; expected no arguments"):
        tool("Look.")  # type: ignore[type-var]


@pytest.mark.parametrize("kind", ["positional", "keyword"])
def test_arguments_without_names_are_refused(kind: str) -> None:
    """A schema cannot describe ``*args`` and ``**kwargs``; otherwise each call of the tool would crash."""

    class Loose(ToolEnvironment):
        if kind == "positional":

            @tool
            def look(self, *where: str) -> str:
                return ""

        else:

            @tool
            def look(self, **where: str) -> str:
                return ""

    with pytest.raises(ConfigError, match=r"look\(where\): got .*; expected named arguments"):
        _ = Loose().tools


def test_tools_are_inherited_and_replaced() -> None:
    """Base classes first; a method of the same name takes the place of its base's."""

    class Market(Shop):
        @tool
        def buy(self, item: int) -> str:  # type: ignore[override]
            """Buy by number."""
            return str(item)

        @tool
        def leave(self) -> str:
            return ""

    assert [entry.name for entry in Market().tools] == ["buy", "price", "crash", "leave"]
    assert Market().tools[0].description == "Buy by number."
    assert Shop().tools[0].description == "Buy something."


async def test_episodes_share_nothing() -> None:
    """Two environments of one class have their own state."""
    one, two = Shop(), Shop()
    await one.step(reply_with(call("buy", item="a")))
    assert (one.sold, two.sold) == (["a"], [])
    await one.close()


class Game(ToolEnvironment):
    """Tools that return rewards."""

    @tool
    def move(self, to: int) -> ToolResult:
        """Moves."""
        return ToolResult(f"at {to}", reward=0.1 * to, done=to == 3, metrics={"moves": 1})

    @tool
    def look(self) -> str:
        """Looks."""
        return "a wall"

    @tool
    def weigh(self) -> Any:
        """Returns a metric that is not a number."""
        return ToolResult("heavy", metrics={"weight": "much"})  # type: ignore[dict-item]


GREY = Image.of(PIL.Image.new("RGB", (4, 3), (9, 9, 9)))


class Gallery(ToolEnvironment):
    """A tool that returns images."""

    @tool
    def show(self, how: str) -> Any:
        """Shows a picture."""
        picture = GREY.to_pil()
        shown: dict[str, Any] = {
            "pil": picture,
            "image": GREY,
            "list": ["Look:", picture, "!"],
            "result": ToolResult([picture, "Look."], reward=1.0, done=True),
            "path": ["Look:", Path("a.png")],
            "bytes": GREY.data,
            "texts": ["Look", "here"],
        }
        return shown[how]


@pytest.mark.parametrize(
    ("how", "content"),
    [("pil", (GREY,)), ("image", (GREY,)), ("list", ("Look:", GREY, "!")), ("result", (GREY, "Look."))],
)
async def test_a_tool_may_return_images(how: str, content: Content) -> None:
    """An image, a PIL image, or a list of strings and images, also in a result with a reward."""
    step = await Gallery().step(reply_with(call("show", how=how)))
    assert [message.content for message in step.messages] == [content]
    assert (step.rewards, step.done) == (((1.0,), True) if how == "result" else ((), False))


@pytest.mark.parametrize("how", ["path", "bytes", "texts"])
async def test_other_values_than_images_are_refused(how: str) -> None:
    """A path or bytes could be anything, and a list without an image is not content."""
    with pytest.raises(
        EnvironmentFailure, match=r"tool show \(.*\): got .*; expected a string, a number, an image, or a"
    ):
        await Gallery().step(reply_with(call("show", how=how)))


async def test_a_tool_may_return_a_reward_and_the_end_of_the_episode() -> None:
    """The rewards of the calls are the rewards of the step, metrics are summed, and after the end no call runs."""
    calls = [call("move", to=1), call("look"), call("move", to=2)]
    step = await Game().step(reply_with(*calls))
    assert [message.content for message in step.messages] == ["at 1", "a wall", "at 2"]
    assert (step.rewards, step.done, step.metrics) == ((0.1, 0.2), False, {"tool_errors": 0, "moves": 2})
    last = await Game().step(reply_with(call("move", to=3), call("look")))
    assert ([message.content for message in last.messages], last.done) == (["at 3"], True)
    assert (await Game().step(reply_with(call("look")))).reward is None
    with pytest.raises(ConfigError, match=r"StepResult.metrics\['weight'\]: got 'much'; expected a finite number"):
        await Game().step(reply_with(call("weigh")))
