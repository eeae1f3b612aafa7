from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from some_stats import some_stats

from flatcake_server.metrics import exposition

ROOT = Path(__file__).parents[3]


def samples(stats) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    text = exposition(lambda: stats).decode()
    families = list(text_string_to_metric_families(text))
    assert len(families) == len({family.name for family in families})
    assert all(family.documentation for family in families)
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def numbers(document: object) -> list[float]:
    """Every number in the stats, wherever it is."""
    if isinstance(document, dict):
        return [n for value in document.values() for n in numbers(value)]
    if isinstance(document, list | tuple):
        return [n for value in document for n in numbers(value)]
    return [float(document)] if isinstance(document, int | float) and document > 1000 else []


def test_every_number_of_the_stats_is_scraped_once():
    stats = some_stats()
    scraped = sorted(value for value in samples(stats).values() if value > 1000)
    assert scraped == sorted(set(numbers(dataclasses.asdict(stats))) - {float(stats.node_id)})


def test_a_scrape_reads_the_stats_of_its_moment():
    stats = some_stats()
    found = samples(stats)

    def sample(name, **labels):
        return found["flatcake_" + name, frozenset(labels.items())]

    counters, disk = stats.counters, "/mnt/a/b"
    assert sample("lookups_total") == counters.lookups_total
    assert sample("hit_bytes_total", medium="ssd") == counters.hit_bytes_total["ssd"]
    assert (
        sample("stored_blocks_total", medium="ssd", reason="first-turn")
        == counters.stored_blocks_total["ssd/first-turn"]
    )
    assert sample("sessions_reclaimed_total", pool=disk) == counters.sessions_reclaimed_total[disk]
    assert sample("pool_free_bytes", pool=disk, medium="ssd") == stats.pools[1].free_bytes
    assert sample("pool_failed", pool="memory", medium="memory") == 0
    assert sample("pool_failed", pool=disk, medium="ssd") == 1
    assert sample("rpc_seconds_sum", verb="lookup") == 2.5
    assert sample("build_info", version="0.1.0", incarnation="ab" * 16, node_id=str(stats.node_id)) == 1
    assert samples(dataclasses.replace(stats, leases=7))["flatcake_leases", frozenset()] == 7


def test_names_are_a_noun_and_a_unit_and_labels_are_the_four():
    text = exposition(some_stats).decode()
    for name, labels, kind in re.findall(r"^(\w+)(\{.*?\})? [\d.e+]+$()", text, re.MULTILINE):
        assert name.startswith("flatcake_"), kind
        keys = set(re.findall(r"(\w+)=", labels))
        assert name == "flatcake_build_info" or keys <= {"pool", "medium", "reason", "verb"}
    for name in re.findall(r"^# TYPE (\w+) counter", text, re.MULTILINE):
        assert name.endswith("_total")


def test_the_dashboard_asks_only_for_metrics_that_exist():
    dashboard = json.loads((ROOT / "deploy/grafana/flatcake.json").read_text())
    names = {name for name, _ in samples(some_stats())}
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    expressions += [
        variable["query"] for variable in dashboard["templating"]["list"] if isinstance(variable.get("query"), str)
    ]
    asked = {name for expression in expressions for name in re.findall(r"flatcake_\w+", expression)}
    assert len(asked) > 15
    assert asked <= names
    identifiers = [panel["id"] for panel in dashboard["panels"]]
    assert len(identifiers) == len(set(identifiers))
