"""A run, an evaluation, or two of them as one HTML file that needs no server and no network.

    source.py   the content, read from a folder: groups, metrics, accounting, laws
    held_up.py  which rollout each batch waited for
    payload.py  the data of a page: a head with the numbers of all samples, chunks with their tokens, times
    page.py     the HTML files
    live.py     a server for an active run

Invariant: a view changes nothing on disk but its own files, and shows exactly the data that the reader of the run
reads. Strings of models and environments are data in the page, never markup or script.
"""

from rollouts.views.page.page import write_view
from rollouts.views.page.source import open_source

__all__ = ["open_source", "write_view"]
