"""Everything in docs/examples runs, as its how-to says, and the ways in which it would be wrong are seen."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType

import pytest

import ipcsync

from .pages import ROOT

EXAMPLES = ROOT / "docs" / "examples"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
TESTED_BY = {
    "from_torch_multiprocessing": "test_examples.py",
    "frameworks": "test_examples.py",
    "photos": "test_pipeline_photos.py",
    "server": "test_examples.py",
    "weights": "test_examples.py",
}
NUMBA_ALONE = """
import numpy
from numba import cuda
cuda.jit(lambda a: None)[1, 1](cuda.to_device(numpy.zeros(1)))
"""


def environment(device: str) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return {**env, "CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else env


def run(device: str, *command: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, env=environment(device), capture_output=True, text=True, timeout=170)


def output(device: str, *command: str | Path) -> str:
    done = run(device, *command)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def load(path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(path.parent))
    spec = importlib.util.spec_from_file_location(f"example_{path.parent.name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_has_a_test() -> None:
    folders = {path.name for path in EXAMPLES.iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    assert folders == set(TESTED_BY)
    for folder, file in TESTED_BY.items():
        assert f'"{folder}"' in (Path(__file__).parent / file).read_text(), f"{file} does not run {folder}"


# -- weights


@pytest.mark.watchdog(180)
@pytest.mark.parametrize("device", DEVICES)
def test_no_worker_ever_reads_half_written_weights(runtime: Path, device: str) -> None:
    pytest.importorskip("torch")
    said = output(device, sys.executable, EXAMPLES / "weights" / "weights.py", "--device", device)
    assert "trained for 20 steps" in said
    assert sorted(line.split()[0] for line in said.splitlines() if line.endswith("versions, all whole")) == [
        "worker-1",
        "worker-2",
    ]


@pytest.mark.watchdog(180)
def test_weights_that_change_behind_the_checksum_are_seen(runtime: Path, tmp_path: Path) -> None:
    """The example can fail: with the two lines of a version in the wrong order, its checksums do not match."""
    pytest.importorskip("torch")
    text = (EXAMPLES / "weights" / "weights.py").read_text()
    step = next(line for line in text.splitlines() if "optimizer.step()" in line)
    meta = next(line for line in text.splitlines() if 'version.meta["checksum"]' in line)
    wrong = text.replace(f"{step}\n{meta}\n", f"{meta}\n{step}\n")
    assert wrong != text
    (tmp_path / "weights.py").write_text(wrong)
    done = run("cpu", sys.executable, tmp_path / "weights.py", "--device", "cpu", "--steps", "3")
    assert done.returncode != 0
    assert "is torn" in done.stderr


# -- torch.multiprocessing


@pytest.mark.watchdog(180)
@pytest.mark.parametrize("device", DEVICES)
def test_before_and_after_say_the_same(runtime: Path, device: str) -> None:
    pytest.importorskip("torch")
    folder = EXAMPLES / "from_torch_multiprocessing"
    before, after = (output(device, sys.executable, folder / name, device) for name in ("before.py", "after.py"))
    assert before == after == "".join(f"{n} {n}\n" for n in range(20))


# -- CuPy, numba, JAX


@pytest.mark.watchdog(180)
@pytest.mark.parametrize("device", DEVICES)
def test_three_frameworks_share_a_pipeline(
    runtime: Path, tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba")
    jax = pytest.importorskip("jax")
    if device == "cuda" and jax.default_backend() != "gpu":
        pytest.skip("this JAX has no GPU support")
    if device == "cuda" and (broken := run(device, sys.executable, "-c", NUMBA_ALONE)).returncode:
        pytest.skip(f"this numba compiles no kernel, also without ipcsync: {broken.stderr.strip().splitlines()[-1]}")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    shutil.copytree(EXAMPLES / "frameworks", tmp_path / "frameworks", ignore=shutil.ignore_patterns("__pycache__"))
    pipeline = tmp_path / "frameworks" / "pipeline.toml"
    output(
        device,
        *(sys.executable, "-c", "from ipcsync.cli import main; main()", "run", str(pipeline)),
        *("--set", f"pipeline.device={device}"),
    )
    expected = load(EXAMPLES / "frameworks" / "stages.py", monkeypatch).expected
    totals = [line.split() for line in (tmp_path / "frameworks" / "totals.txt").read_text().splitlines()]
    assert [int(number) for number, _ in totals] == list(range(10))
    for number, total in totals:
        assert float(total) == pytest.approx(expected(int(number)), rel=1e-3)


def test_jax_takes_a_readers_array_where_it_lies(session: ipcsync.Session) -> None:
    jax = pytest.importorskip("jax")
    channel = session.create_channel("waves", shape=(65536,), dtype="float32", depth=2, device="cpu")
    with channel.reader() as reader, channel.writer() as writer:
        with writer.slot() as slot:
            slot.array[...] = 3.0
        with reader.get(timeout=5.0) as slot:
            taken = jax.device_put(slot.array, jax.devices("cpu")[0])
            assert taken.unsafe_buffer_pointer() == slot.array.ctypes.data
            assert float(taken.sum()) == 3.0 * 65536
            del taken


# -- the server


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load(EXAMPLES / "server" / "client.py", monkeypatch)


def serve(client: ModuleType, body: Callable[..., Awaitable[None]], capsys: pytest.CaptureFixture[str]) -> str:
    """Runs `body(server, port, pids)` beside a server; what the server printed."""

    async def main() -> None:
        async with client.running("--device", "cpu") as (server, port, pids):
            await asyncio.wait_for(body(server, port, pids), 60)

    asyncio.run(main())
    return capsys.readouterr().out


@pytest.mark.watchdog(120)
@pytest.mark.parametrize("device", DEVICES)
def test_the_demonstration(runtime: Path, device: str) -> None:
    said = output(device, sys.executable, EXAMPLES / "server" / "client.py", "--device", device)
    assert "60 answers, all right" in said
    assert said.count("an error, at once: session 'infer' (pid") == 3


@pytest.mark.watchdog(120)
@pytest.mark.parametrize("worker", ["preprocess", "infer"])
def test_a_client_hears_of_a_killed_worker(
    runtime: Path, client: ModuleType, capsys: pytest.CaptureFixture[str], worker: str
) -> None:
    async def body(server: asyncio.subprocess.Process, port: int, pids: dict[str, int]) -> None:
        asking = await client.Client.connect(port)
        assert await asking.ask("a") == {"a": 1}
        os.kill(pids[worker], signal.SIGSTOP)  # what is asked now is under way when it dies
        asked = [asyncio.create_task(asking.ask("b")) for _ in range(3)]
        await asyncio.sleep(0)
        os.kill(pids[worker], signal.SIGKILL)
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(answer, RuntimeError)
            assert f"session '{worker}' (pid {pids[worker]}) died" in str(answer) or "closed" in str(answer)
        with pytest.raises(RuntimeError, match="closed"):
            await asking.ask("c")
        await asking.close()
        assert await server.wait() == 1

    serve(client, body, capsys)


@pytest.mark.watchdog(120)
def test_a_client_gets_no_more_requests_under_way_than_it_has_room_for(
    runtime: Path, client: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    async def body(server: asyncio.subprocess.Process, port: int, pids: dict[str, int]) -> None:
        greedy, modest = [await client.Client.connect(port) for _ in range(2)]
        os.kill(pids["infer"], signal.SIGSTOP)
        asked = [asyncio.create_task(greedy.ask("abc" * (n % 3))) for n in range(60)]
        other = asyncio.create_task(modest.ask("z"))
        await asyncio.sleep(0)
        os.kill(pids["infer"], signal.SIGCONT)
        assert await other == {"z": 1}
        for n, answer in enumerate(await asyncio.gather(*asked)):
            assert answer == (dict.fromkeys("abc", n % 3) if n % 3 else {})
        await greedy.close()
        await modest.close()
        server.terminate()
        assert await server.wait() == 0

    assert "at most 8 requests of one client were under way" in serve(client, body, capsys)


@pytest.mark.watchdog(120)
def test_clients_come_and_go_and_speak_nonsense(
    runtime: Path, client: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    async def body(server: asyncio.subprocess.Process, port: int, pids: dict[str, int]) -> None:
        for n in range(40):  # more than there could be channels open, were they kept
            asking = await client.Client.connect(port)
            if n % 2:
                assert await asking.ask("Aa") == {"a": 2}
            await asking.close()
        lines, out = await asyncio.open_connection("127.0.0.1", port)
        out.write(b"no json\n")
        assert await lines.read() == b'{"error": "Expecting value: line 1 column 1 (char 0)"}\n'
        out.close()
        await out.wait_closed()
        asking = await client.Client.connect(port)
        assert await asking.ask("still well") == {"s": 1, "t": 1, "i": 1, "l": 4, "w": 1, "e": 1}
        await asking.close()

    serve(client, body, capsys)
