"""The broker's page, metrics and health check, against a real broker; the page itself in a headless browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ipcsync import Session, connect
from ipcsync.errors import InvalidArgument
from ipcsync_broker.http import Page, address

from ..harness import Broker, Child, Peer, wait_until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def get(port: int, path: str, **headers: str) -> tuple[int, str, Any]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode(), answer.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(), error.headers


@pytest.fixture
def page(broker: Broker, runtime: Path) -> Iterator[Page]:
    """The page, served from here: then a stopped broker shows what the page says of a loop that is stuck."""
    made = Page("127.0.0.1:0", runtime)
    yield made
    made.stop()


def test_the_option_starts_it_in_the_broker(runtime: Path) -> None:
    broker = Broker(runtime, "--http", "127.0.0.1:0", "--log-format", "json")
    try:
        said = wait_until(lambda: re.search(r"http://127\.0\.0\.1:(\d+)/", broker.log()), "the page's address")
        status, body, _ = get(int(said[1]), "/healthz")
        assert (status, json.loads(body)["ok"]) == (200, True)
        assert json.loads(get(int(said[1]), "/status.json")[1])["broker"]["pid"] == broker.pid
        assert all(json.loads(line)["level"] for line in broker.log().splitlines())
    finally:
        assert broker.stop() == 0


def test_an_address_that_cannot_be_had_ends_the_broker_with_the_reason(page: Page, runtime: Path) -> None:
    with pytest.raises(InvalidArgument, match="Address already in use"):
        Page(f"127.0.0.1:{page.port}", runtime)
    for text in ("9464", "127.0.0.1", "127.0.0.1:99999", ""):
        with pytest.raises(InvalidArgument, match="give HOST:PORT"):
            address(text)
    assert address("[::1]:80") == ("::1", 80)


def _make_and_wait(peer: Peer) -> None:
    with connect(name="doomed") as session:
        session.create_event("doomed-event", device="cpu").record()
        peer.send(os.getpid())
        peer.recv()


def test_series_of_the_dead_disappear_and_none_has_a_pid(page: Page, spawn: Callable[..., Child]) -> None:
    child = spawn(_make_and_wait)
    pid = child.recv()

    def said() -> str:
        return get(page.port, "/metrics")[1]

    wait_until(lambda: "doomed-event" in said() and 'session="doomed"' in said(), "its series")
    assert not re.search(rf'"[^"]*\b{pid}\b[^"]*"', said()), "a pid in a label"
    child.kill()
    wait_until(lambda: "doomed" not in said(), "the end of its series")
    assert "ipcsync_deaths_total 1.0" in said()


def test_status_and_metrics_show_what_there_is(page: Page, session: Session) -> None:
    event = session.create_event("frame", device="cpu")
    event.record()
    channel = session.create_channel("frames", shape=(4,), dtype="uint8", depth=2, device="cpu")
    with channel.writer() as writer, writer.slot() as slot:
        slot.array[...] = 1
    wait_until(lambda: '"frames"' in get(page.port, "/status.json")[1], "the channel's appearance")
    seen = json.loads(get(page.port, "/status.json")[1])
    assert [(e["name"], e["issued"], e["completed"]) for e in seen["events"]] == [("frame", 1, 1)]
    assert seen["events"][0]["recorder"]["pid"] == os.getpid()
    assert [(c["name"], c["depth"], c["completed"]) for c in seen["channels"]] == [("frames", 2, 1)]
    _, text, headers = get(page.port, "/metrics")
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert 'ipcsync_rounds_completed_total{kind="channel",name="frames",namespace="default"} 1.0' in text
    assert 'ipcsync_sessions{state="live"} 1.0' in text
    event.close()
    session.unlink("frame")
    wait_until(lambda: 'name="frame"' not in get(page.port, "/metrics")[1], "the end of the event's series")


def test_health_is_the_loops_own_answer(page: Page, broker: Broker) -> None:
    assert get(page.port, "/healthz")[0] == 200
    os.kill(broker.pid, signal.SIGSTOP)
    try:
        _, body = wait_until(lambda: (a := get(page.port, "/healthz"))[0] == 503 and a, "the refusal")[:2]
        assert "did not answer within 2 s" in json.loads(body)["why"]
    finally:
        os.kill(broker.pid, signal.SIGCONT)
    wait_until(lambda: get(page.port, "/healthz")[0] == 200, "its recovery")


def test_what_is_not_there_and_other_sites_names_are_refused(page: Page) -> None:
    assert get(page.port, "/../etc/passwd")[0] == 404
    assert get(page.port, "/", Host="evil.example:80")[0] == 403
    assert get(page.port, "/", Host=f"localhost:{page.port}")[0] == 200
    assert "default-src 'self'" in get(page.port, "/")[2]["Content-Security-Policy"]


def test_many_at_once_cost_the_loop_one_question(page: Page) -> None:
    asked = []
    real = page.looker._asker.status
    page.looker._asker.status = lambda timeout: asked.append(1) or real(timeout)  # type: ignore[func-returns-value,method-assign]
    threads = [threading.Thread(target=get, args=(page.port, "/status.json")) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 1 <= len(asked) < 16


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_the_page_draws_the_graph_in_a_browser(page: Page, session: Session, tmp_path: Path) -> None:
    channel = session.create_channel("frames", shape=(4,), dtype="uint8", depth=2, device="cpu")
    with channel.writer() as writer, session.open_channel("frames").reader() as reader:
        with writer.slot() as slot:
            slot.array[...] = 1
        dom = browse(page.port, tmp_path)
        with reader.get():
            pass
    text = re.sub(r"<[^>]+>", " ", dom)
    assert re.search(r'<rect[^>]* class="stage"', dom)
    assert re.search(r'<rect[^>]* class="channel"', dom)
    assert dom.count('<path d="M') >= 3  # the arrow's tip, and both ways
    assert "version" in text
    assert "1 behind" in text
    assert 'id="trouble" role="alert" hidden' in dom


def browse(port: int, profile: Path) -> str:
    """The page's document after it has drawn."""
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    done = subprocess.run(
        [
            *command,
            f"--user-data-dir={profile}",
            "--virtual-time-budget=3000",
            "--dump-dom",
            f"http://127.0.0.1:{port}/",
        ],
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    return done.stdout
