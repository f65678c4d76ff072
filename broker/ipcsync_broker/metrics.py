"""What Prometheus is told. Pure: an overview in, metric families out. Names are stable: dashboards rest on them.

Everything is made from the present at each scrape: what has ended is simply not there any more. No label is a pid or a
session's number, so that a restart does not make a new series. prometheus-client is loaded when first asked.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: name of a broker's count -> (metric, what it counts)
_COUNTS = {
    "requests": ("ipcsync_requests", "Requests that fit the envelope's schema"),
    "bad_messages": ("ipcsync_bad_messages", "Messages refused: not msgpack, too large, or against the schema"),
    "unsent_answers": ("ipcsync_unsent_answers", "Answers dropped because the client did not read"),
    "broker_errors": ("ipcsync_broker_errors", "Effects that failed by a mistake of the broker's own"),
    "refused_uids": ("ipcsync_refused_connections", "Connections and sessions refused because of their uid"),
    "refused_keys": ("ipcsync_refused_keys", "Refusals of CURVE keys that are not allowed"),
    "refused_handshakes": ("ipcsync_refused_handshakes", "tcp connections that did not prove a CURVE key"),
    "refused_surplus": ("ipcsync_refused_surplus", "Connections refused because there were as many as there may be"),
    "refused_machines": ("ipcsync_refused_machines", "Sessions refused because they run on another machine"),
    "journal_failures": ("ipcsync_journal_failures", "Records that the journal had no room for"),
    "deaths": ("ipcsync_deaths", "Sessions whose process died"),
    "leases_out": ("ipcsync_leases_out", "Sessions that were stopped for longer than their lease"),
    "condemned": ("ipcsync_condemnations", "Events, channels and arrays that were condemned"),
}


def text(look: Callable[[], Mapping[str, Any]]) -> bytes:
    """The exposition of what `look` sees."""
    from prometheus_client import CollectorRegistry, generate_latest

    class Now:
        def collect(self) -> Iterator[Metric]:
            return families(look())

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Now())
    return generate_latest(registry)


def families(seen: Mapping[str, Any]) -> Iterator[Metric]:
    """Every metric family of one overview."""
    yield from _broker(seen)
    yield from _quotas(seen)
    yield from _sessions(seen)
    yield from _things(seen)
    yield from _channels(seen)


def _broker(seen: Mapping[str, Any]) -> Iterator[Metric]:
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        InfoMetricFamily,
    )

    told, counts = seen["broker"], seen["counts"]
    yield InfoMetricFamily("ipcsync_broker", "The broker", {"version": told["version"]})
    yield GaugeMetricFamily("ipcsync_broker_uptime_seconds", "Since the broker started", told["uptime"])
    yield GaugeMetricFamily("ipcsync_broker_tick_age_seconds", "Since the loop's last turn", told["tick_age"])
    yield CounterMetricFamily("ipcsync_announcements", "Announcements published", told["announced"])
    for name, (metric, help) in _COUNTS.items():
        yield CounterMetricFamily(metric, help, counts.get(name, 0))
    loop = told["loop"]
    if loop:
        total = 0
        buckets = []
        for bound, count in loop["late"]:
            total += count
            buckets.append(("+Inf" if bound is None else str(bound), total))
        late = HistogramMetricFamily("ipcsync_broker_loop_late_seconds", "How late a turn of the loop was")
        late.add_metric([], buckets, loop["late_sum"])
        yield late


def _quotas(seen: Mapping[str, Any]) -> Iterator[Metric]:
    from prometheus_client.core import GaugeMetricFamily

    told, quotas = seen["broker"], seen["quotas"]
    yield GaugeMetricFamily("ipcsync_memory_bytes", "Memory that the broker owns", told["bytes"])
    used = GaugeMetricFamily("ipcsync_quota_used", "Of a quota of the broker", labels=["resource"])
    limit = GaugeMetricFamily("ipcsync_quota_limit", "A quota of the broker", labels=["resource"])
    resources = {"sessions": told["sessions"], "events": told["things"], "nbytes": told["bytes"]}
    for resource, count in resources.items():
        name = "bytes" if resource == "nbytes" else resource
        used.add_metric([name], count)
        if quotas.get(resource) is not None:
            limit.add_metric([name], quotas[resource])
    yield used
    yield limit


def _sessions(seen: Mapping[str, Any]) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    by_state = Counter({"live": 0, "dying": 0})
    waits: defaultdict[tuple[str, str, str], int] = defaultdict(int)
    missed: Counter[tuple[str, str]] = Counter()
    for told in seen["sessions"]:
        by_state["stopped" if told["process"] == "stopped" else told["state"]] += 1
        for outcome, count in told.get("long_waits", {}).items():
            waits[told["namespace"], told["name"], outcome] += count
        missed[told["namespace"], told["name"]] += told.get("announcement_gaps", 0)
    sessions = GaugeMetricFamily("ipcsync_sessions", "Sessions by their state", labels=["state"])
    for state, count in sorted(by_state.items()):
        sessions.add_metric([state], count)
    yield sessions
    ended = CounterMetricFamily(
        "ipcsync_long_waits",
        "Host waits of 20 ms and more, by how they ended",
        labels=["namespace", "session", "outcome"],
    )
    for labels, count in sorted(waits.items()):
        ended.add_metric(list(labels), count)
    yield ended
    gaps = CounterMetricFamily(
        "ipcsync_announcement_gaps",
        "How often a subscription of a session missed announcements",
        labels=["namespace", "session"],
    )
    for who, count in sorted(missed.items()):
        gaps.add_metric(list(who), count)
    yield gaps


def _things(seen: Mapping[str, Any]) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    labels = ["namespace", "kind", "name"]
    count = GaugeMetricFamily("ipcsync_things", "Events, channels and arrays", labels=["kind"])
    issued = CounterMetricFamily("ipcsync_rounds_issued", "Rounds submitted: items, versions", labels=labels)
    completed = CounterMetricFamily("ipcsync_rounds_completed", "Rounds complete: items, versions", labels=labels)
    condemned = GaugeMetricFamily("ipcsync_condemned", "1 once no further round will come true", labels=labels)
    attached = GaugeMetricFamily("ipcsync_attached_sessions", "Sessions that have it open", labels=labels)
    for kind in ("events", "channels", "arrays"):
        count.add_metric([kind], len(seen[kind]))
        for told in seen[kind]:
            if told["named"]:  # what was unlinked may share its name with its successor
                values = [told["namespace"], told["kind"], told["name"]]
                issued.add_metric(values, told["issued"])
                completed.add_metric(values, told["completed"])
                condemned.add_metric(values, told["verdict"] is not None)
                attached.add_metric(values, told["attached"])
    yield from (count, issued, completed, condemned, attached)


def _channels(seen: Mapping[str, Any]) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    labels = ["namespace", "name"]
    each = [*labels, "reader"]
    depth = GaugeMetricFamily("ipcsync_channel_depth", "Buffers of the channel", labels=labels)
    full = GaugeMetricFamily("ipcsync_channel_occupancy_ratio", "Buffers in use, by the slowest reader", labels=labels)
    nbytes = CounterMetricFamily("ipcsync_channel_bytes", "Bytes of the complete items' buffers", labels=labels)
    readers = GaugeMetricFamily("ipcsync_channel_readers", "Readers attached", labels=labels)
    behind = GaugeMetricFamily("ipcsync_channel_reader_behind", "Published items still to be taken", labels=each)
    skipped = CounterMetricFamily("ipcsync_channel_reader_skipped", "Items a `latest` reader missed", labels=each)
    for told in seen["channels"]:
        if not told["named"] or not told["depth"]:
            continue
        values = [told["namespace"], told["name"]]
        depth.add_metric(values, told["depth"])
        full.add_metric(values, told["occupancy"])
        nbytes.add_metric(values, told["completed"] * told["item_bytes"])
        readers.add_metric(values, len(told["readers"]))
        most: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
        for reader in told["readers"]:
            if reader["reader"]:  # replicas of a stage have one name: the slowest of them counts
                found = most[reader["reader"]["name"]]
                found[0], found[1] = max(found[0], reader["behind"]), found[1] + reader["skipped"]
        for name, (items, missed) in sorted(most.items()):
            behind.add_metric([*values, name], items)
            skipped.add_metric([*values, name], missed)
    yield from (depth, full, nbytes, readers, behind, skipped)
