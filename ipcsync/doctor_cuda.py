"""The GPUs' half of ``ipcsync doctor``. Nothing here touches CUDA: each probe is a process of its own."""

from __future__ import annotations

from collections.abc import Iterator

from .doctor_probe import FAILS, OK, WARNING, Finding, probe


def findings() -> Iterator[Finding]:
    driver = probe("cuda", "cuda.driver")
    yield driver
    if driver.status == WARNING:  # no GPU: nothing more to look at
        return
    count = int(probe("", "cuda.count").text) if driver.status == OK else 0
    for index in range(count):
        name = f"cuda:{index}"
        found = probe(name, "cuda.device", str(index))
        yield found
        if found.status == FAILS:
            continue
        yield probe(f"{name} arrays", "cuda.arrays", str(index))
        yield probe(f"{name} memory operations", "cuda.memory_operations", str(index))
        yield probe(f"{name} blocked streams", "cuda.blocked_streams", str(index))
        yield probe(f"{name} interprocess events", "cuda.events", str(index))
        yield probe(f"{name} interprocess memory", "cuda.memory", str(index))
        yield probe(f"{name} words of two processes", "cuda.words", str(index))
    if count > 1:
        yield probe("links between GPUs", "cuda.links")
