"""Progress of a run in a Jupyter notebook: one output of a cell, updated in place.

    progress = NotebookProgress(recipe.batches)
    result = await run(recipe, RunWriter("runs/a"), watch=progress.watch, on_batch=progress.batch)

Invariant: the display only reads; every text is escaped. Needs IPython, which every notebook has.
"""

from __future__ import annotations

import html
import importlib
import importlib.util
from collections import deque
from collections.abc import Callable, Mapping

import anyio

from rollouts.base.terminal import visible
from rollouts.errors import ConfigError
from rollouts.training.manager import AsyncRolloutManager
from rollouts.views.terminal.console import SafeConsole
from rollouts.views.terminal.progress import Progress, batch_line, plain_line

__all__ = ["NotebookProgress"]

_REDRAW_SECONDS = 1.0
_MAX_LINES = 20
"""Lines of the last batches."""


class NotebookProgress:
    """The state of a run, and a line for each of its last batches.

    Args:
        batches: the number of batches of the recipe.
        show: displays HTML, in place of the previous HTML; by default in the output of the current cell.

    Raises:
        ConfigError: IPython is not installed, and ``show`` is not given.
    """

    def __init__(self, batches: int, *, show: Callable[[str], None] | None = None) -> None:
        self._batches = batches
        self._show = show or _in_cell()
        self._progress = Progress(SafeConsole(quiet=True), quiet=True)
        self._lines: deque[str] = deque(maxlen=_MAX_LINES)

    def batch(self, numbers: Mapping[str, float]) -> None:
        """Add the line of a batch."""
        rewards = self._progress.rewards
        self._lines.append(batch_line(numbers, rewards[-1] if rewards else None).plain)
        self._progress.batch(numbers)

    async def watch(self, manager: AsyncRolloutManager) -> None:
        """Display the state until cancelled, and once more then."""
        await self._progress.watch(manager, batches=self._batches)  # quiet: it notes what was kept before, and returns
        try:
            while True:
                self._draw(manager)
                await anyio.sleep(_REDRAW_SECONDS)
        finally:
            self._draw(manager)

    def html(self, state: str, *, done: float) -> str:
        """The display: how many batches are done, the state, and the lines of the last batches, the newest first."""
        bar = f'<progress value="{done:g}" max="{self._batches}" style="width: 100%"></progress>'
        text = html.escape("\n".join(map(visible, [state, *reversed(self._lines)])))
        return f'<div>{bar}<pre style="white-space: pre-wrap">{text}</pre></div>'

    def _draw(self, manager: AsyncRolloutManager) -> None:
        state = plain_line(manager, batches=self._batches, progress=self._progress)
        done = manager.batches + manager.accounting.ready / manager.config.batch_size
        self._show(self.html(state, done=min(done, self._batches)))


def _in_cell() -> Callable[[str], None]:
    """A function that displays HTML in the current cell, and updates it from the second call on."""
    if importlib.util.find_spec("IPython") is None:
        raise ConfigError.of("NotebookProgress.show", None, "a function, where IPython is not installed")
    display = importlib.import_module("IPython.display")
    handle = display.display(display.HTML(""), display_id=True)

    def show(text: str) -> None:
        handle.update(display.HTML(text))

    return show
