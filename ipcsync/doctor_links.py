"""How the GPUs of a machine reach each other, as ``ipcsync doctor`` shows it. Pure: what CUDA says is handed in."""

from __future__ import annotations

from collections.abc import Mapping

from .doctor_probe import OK, WARNING, Finding

NVLINK, PCIE, COPY = "NVLink", "PCIe", "copy"
_MEANS = {
    NVLINK: "kernels of one read the other's memory, atomics included",
    PCIE: "kernels of one read the other's memory, over the bus",
    COPY: "no peer access: only copies go from one to the other, through the host's memory",
}


def kind(access: bool, atomics: bool) -> str:
    """The kind of link from one device to another: peer access at all, and with native atomics, which PCIe has not."""
    return COPY if not access else NVLINK if atomics else PCIE


def finding(links: Mapping[tuple[int, int], str]) -> Finding:
    """The matrix of `links`, by (who reads, whose memory it is) -> kind, and what its words mean."""
    names = sorted({index for pair in links for index in pair})
    head = [f"cuda:{index}" for index in names]
    width = max(len(text) for text in (*head, *_MEANS))
    rows = [["", *head]]
    rows += [[f"cuda:{a}", *("-" if a == b else links.get((a, b), COPY) for b in names)] for a in names]
    lines = ["  ".join(cell.ljust(width) for cell in row).rstrip() for row in rows]
    used = [word for word in _MEANS if word in links.values()]
    lines += [f"{word}: {_MEANS[word]}" for word in used]
    text = "row reads column\n" + "\n".join(lines)
    if COPY in used:
        advice = "where there is no peer access, copy what you read (docs/explanation/cuda.md); events work between all"
        return Finding("", WARNING, text, advice)
    return Finding("", OK, text)
