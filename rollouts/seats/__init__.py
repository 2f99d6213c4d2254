"""Seats: several agents in one rollout, such as players, a proposer and solvers, debaters and a judge, a user.

    async def play(seats, prompt):
        white, black = seats.white.chat("You play white."), seats.black.chat("You play black.")
        reply = await white.ask("Begin.")
        ...
        white.reward, black.reward = 1.0, -1.0

    generate_fn = partial(generate_play_batch, play=play, seats={"white": Seat(), "black": Seat()}, ...)

Each conversation of a seat that is trained is a sample with ``Sample.seat`` and ``Sample.conversation``.
"""

from typing import TYPE_CHECKING

from rollouts.base.lazy_face import lazy_face

if TYPE_CHECKING:
    from rollouts.concurrency.gathered import gather
    from rollouts.seats.chat import Chat, Reply
    from rollouts.seats.handles import Seats
    from rollouts.seats.play import PlayFn, generate_play_batch, play_rollout_to_samples
    from rollouts.seats.recipe import play_recipe
    from rollouts.seats.run import Run
    from rollouts.seats.seat import Seat

__all__ = [
    "Chat",
    "PlayFn",
    "Reply",
    "Run",
    "Seat",
    "Seats",
    "gather",
    "generate_play_batch",
    "play_recipe",
    "play_rollout_to_samples",
]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "rollouts.seats.chat": ["Chat", "Reply"],
        "rollouts.concurrency.gathered": ["gather"],
        "rollouts.seats.play": ["PlayFn", "generate_play_batch", "play_rollout_to_samples"],
        "rollouts.seats.recipe": ["play_recipe"],
        "rollouts.seats.run": ["Run"],
        "rollouts.seats.seat": ["Seat"],
        "rollouts.seats.handles": ["Seats"],
    },
)
