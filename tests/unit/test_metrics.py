"""What Prometheus is told: parsed back, for its names, labels and values."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from ipcsync_broker import metrics

from .overview_sample import sample, session, thing


def samples(seen: dict[str, Any]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """(name, labels) -> value; two samples of the same name and labels would be refused by Prometheus."""
    found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for family in text_string_to_metric_families(metrics.text(lambda: seen).decode()):
        assert family.documentation
        for each in family.samples:
            key = each.name, tuple(sorted(each.labels.items()))
            assert key not in found, key
            found[key] = each.value
    return found


def test_names_and_values() -> None:
    found = samples(sample())
    channel = (("kind", "channel"), ("name", "frames"), ("namespace", "default"))
    of_channel = (("name", "frames"), ("namespace", "default"))
    reader = (*of_channel, ("reader", "edges"))
    expected = {
        ("ipcsync_rounds_issued_total", channel): 7,
        ("ipcsync_rounds_completed_total", channel): 5,
        ("ipcsync_channel_occupancy_ratio", of_channel): 0.75,
        ("ipcsync_channel_bytes_total", of_channel): 5 * 1024,
        ("ipcsync_channel_reader_behind", tuple(sorted(reader))): 2,
        ("ipcsync_channel_reader_skipped_total", tuple(sorted(reader))): 3,
        ("ipcsync_sessions", (("state", "live"),)): 2,
        ("ipcsync_sessions", (("state", "dying"),)): 0,
        ("ipcsync_deaths_total", ()): 2,
        ("ipcsync_bad_messages_total", ()): 1,
        ("ipcsync_quota_limit", (("resource", "sessions"),)): 256,
        ("ipcsync_broker_loop_late_seconds_bucket", (("le", "0.1"),)): 99,
        ("ipcsync_broker_loop_late_seconds_count", ()): 100,
        ("ipcsync_broker_info", (("version", "0.1.0"),)): 1,
    }
    assert {key: found[key] for key in expected} == expected
    assert ("ipcsync_quota_limit", (("resource", "bytes"),)) not in found


def test_no_label_is_a_pid_or_a_number_of_a_session() -> None:
    labels = {label for _, pairs in samples(sample()) for label, _ in pairs}
    assert labels <= {"version", "resource", "state", "namespace", "kind", "name", "reader", "session", "outcome", "le"}
    sessions = {value for _, pairs in samples(sample()) for label, value in pairs if label == "session"}
    assert sessions == {"read", "edges"}


def test_series_of_what_has_ended_disappear_and_namesakes_are_one() -> None:
    seen = sample()
    seen["channels"] = []
    seen["events"] = [thing("event", "frame", 1, named=False), thing("event", "frame", 4, issued=1)]
    seen["sessions"] = [session(1, "read"), session(5, "read"), session(6, "edges", process="stopped")]
    found = samples(seen)
    assert not [key for key in found if dict(key[1]).get("name") == "frames"]
    event = (("kind", "event"), ("name", "frame"), ("namespace", "default"))
    assert found["ipcsync_rounds_issued_total", event] == 1
    came = (("namespace", "default"), ("outcome", "came"), ("session", "read"))
    assert found["ipcsync_long_waits_total", came] == 6
    assert found["ipcsync_sessions", (("state", "stopped"),)] == 1
