"""The play: two sides argue in turn, and the judge reads both."""

from __future__ import annotations

import re

from rollouts.dtypes import Prompt
from rollouts.seats import Seats

__all__ = ["QUESTIONS", "play"]

QUESTIONS = (
    "Should a chess engine be allowed at school tournaments?",
    "Is a four-day week good for a small company?",
    "Should all code be reviewed before it is merged?",
    "Are printed maps still useful?",
)
SIDE = "You debate this question and argue {side}: {question} Answer your opponent in at most three sentences."
JUDGE = "You judge a debate. Answer PRO or CON, for the side that argued better."
ROUNDS = 2
_VERDICT = re.compile(r"\b(?:PRO|CON)\b")


async def play(seats: Seats, prompt: Prompt) -> dict[str, str]:
    """One debate; the rewards of the sides add up to 1, half each if the judge says both words or none."""
    sides = [seats[name].chat(SIDE.format(side=name, question=prompt.prompt)) for name in ("pro", "con")]
    said, log = "Begin.", []
    for _ in range(ROUNDS):
        for side in sides:
            if side.over:
                continue
            reply = await side.ask(said)
            if reply.over:
                continue
            said = reply.text or "(nothing)"
            log.append(f"{side.seat.upper()}: {said}")
    verdict = (await seats.judge.chat(JUDGE).ask("\n\n".join([str(prompt.prompt), *log]))).text
    words = set(_VERDICT.findall(verdict))
    sides[0].reward = float("PRO" in words) if len(words) == 1 else 0.5
    sides[1].reward = 1 - sides[0].reward
    return {"verdict": verdict}
