"""A run's numbers, scraped by the real library's format."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
from aiohttp import ClientSession

from rollouts.commands import main
from rollouts.errors import ConfigError
from rollouts.observability.prometheus import serving_metrics
from rollouts.runs.verify import verify_run

client = pytest.importorskip("prometheus_client", reason="prometheus-client is not installed (extra: prometheus)")


pytestmark = pytest.mark.extra


async def test_a_scrape_reads_the_numbers() -> None:
    """Names are those of Prometheus; a metric that only grows is a counter."""
    from prometheus_client.parser import text_string_to_metric_families

    numbers = {"prompts/in_flight": 3.0, "tokens/cached": 70.0, "loop_lag/p99": 0.25, "batch/tokens/mean": 9.5}
    numbers |= {"reward/my-task": 0.5, "reward/my_task": 0.75, "rollouts/a-b": 1.0, "rollouts/a.b": 2.0}
    read = anyio.Event()

    def read_numbers() -> dict[str, float]:
        read.set()
        return numbers

    with serving_metrics(0) as metrics:
        async with anyio.create_task_group() as tasks, ClientSession() as session:
            tasks.start_soon(metrics.run, read_numbers)
            await read.wait()
            async with session.get(f"http://127.0.0.1:{metrics.port}/metrics") as answer:
                text = await answer.text()
            tasks.cancel_scope.cancel()
    found = list(text_string_to_metric_families(text))
    families = {family.name: family for family in found}
    assert len(families) == len(found), "each metric once, also where names differ in punctuation alone"
    for family, values in (("reward_my_task", [0.5, 0.75]), ("rollouts_a_b", [1.0, 2.0])):
        assert [sample.value for sample in families[f"rollouts_{family}"].samples] == values
        assert len({tuple(sample.labels.items()) for sample in families[f"rollouts_{family}"].samples}) == 2
    assert families["rollouts_prompts_in_flight"].samples[0].value == 3
    assert families["rollouts_batch_tokens_mean"].type == "gauge"
    assert (families["rollouts_tokens_cached"].type, families["rollouts_tokens_cached"].samples[0].value) == (
        "counter",
        70,
    )
    assert families["rollouts_loop_lag_p99"].samples[0].value == 0.25


def test_a_port_that_is_taken_is_refused() -> None:
    """By name, before the run."""
    with serving_metrics(0) as metrics:
        with pytest.raises(ConfigError, match="--metrics-port"):
            with serving_metrics(metrics.port):
                pass


def test_the_metrics_of_a_run_are_served(tmp_path: Path, engine_url: str) -> None:
    """The command serves metrics and creates spans while it runs, with the same results."""
    line = ["run", str(Path(__file__).parents[2] / "configs" / "calculator.py"), "--endpoint", engine_url]
    sizes = ["--set", "batch_size=2", "--set", "n_samples_per_prompt=4"]
    assert main([*line, *sizes, "--out", str(tmp_path / "run"), "--metrics-port", "0", "--trace"]) == 0
    assert verify_run(tmp_path / "run").violations == []
    with pytest.raises(SystemExit, match="2"):
        main([*line, *sizes, "--out", str(tmp_path / "other"), "--metrics-port", "99999999"])
