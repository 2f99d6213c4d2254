"""The live view follows a run that grows, and answers its own page only."""

from __future__ import annotations

import functools
import http.client
from pathlib import Path

import pytest

from rollouts.errors import ConfigError
from rollouts.runs.writer import RunWriter
from rollouts.training import Sample
from rollouts.views.page import open_source
from rollouts.views.page.live import LiveView, serving_view


def get(url: str, path: str, host: str | None = None) -> tuple[int, bytes]:
    address = url.removeprefix("http://").rstrip("/")
    connection = http.client.HTTPConnection(address, timeout=10)
    connection.request("GET", path, headers={"Host": host or address})
    response = connection.getresponse()
    found = response.status, response.read()
    connection.close()
    return found


def test_a_batch_that_comes_changes_the_stamp_and_the_parts(tmp_path: Path) -> None:
    """The page has no data; its parts are those of the run as it is now, without a file that is being written."""
    writer = RunWriter(tmp_path / "run")
    view = LiveView([functools.partial(open_source, tmp_path / "run", verify=False)], [None])
    with serving_view(view, 0) as url:
        status, page = get(url, "/")
        assert (status, b'id="head-0"></script>' in page, b"connect-src &#x27;self&#x27;" in page) == (200, True, True)
        assert b"; img-src data:" in page  # of parts that come later
        first, head = get(url, "/stamp"), get(url, "/part/head-0")
        (tmp_path / "run" / ".run.json.writing").touch()
        assert get(url, "/stamp") == first
        assert get(url, "/part/chunk-0-0")[0] == 404
        writer.write_batch([Sample("?", "", [1], [0], 1.0, group_index=0, index=0)], {})
        assert get(url, "/stamp") != first
        assert get(url, "/part/head-0") != head
        assert get(url, "/part/chunk-0-0")[0] == 200


def test_another_host_is_refused(tmp_path: Path) -> None:
    """A web page whose name leads to 127.0.0.1 reads nothing; no path leads to a file."""
    RunWriter(tmp_path / "run")
    view = LiveView([functools.partial(open_source, tmp_path / "run", verify=False)], [None])
    with serving_view(view, 0) as url:
        assert get(url, "/", host="evil.example")[0] == 403
        assert get(url, "/part/../../run.json")[0] == 404
        with (
            pytest.raises(ConfigError, match="--port: got"),
            serving_view(view, int(url.rsplit(":", 1)[1].rstrip("/"))),
        ):
            pass
