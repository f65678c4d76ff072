"""The matrix of links between GPUs that ``ipcsync doctor`` shows."""

from __future__ import annotations

import pytest

from ipcsync.doctor_links import COPY, NVLINK, PCIE, finding, kind
from ipcsync.doctor_probe import OK, WARNING


@pytest.mark.parametrize(
    ("access", "atomics", "word"),
    [(True, True, NVLINK), (True, False, PCIE), (False, False, COPY), (False, True, COPY)],
)
def test_what_cuda_says_is_one_of_three_kinds(access: bool, atomics: bool, word: str) -> None:
    assert kind(access, atomics) == word


def test_two_devices_with_nvlink() -> None:
    found = finding({(0, 1): NVLINK, (1, 0): NVLINK})
    assert found.status == OK
    assert found.text.splitlines() == [
        "row reads column",
        "        cuda:0  cuda:1",
        "cuda:0  -       NVLink",
        "cuda:1  NVLink  -",
        "NVLink: kernels of one read the other's memory, atomics included",
    ]
    assert found.advice == ""


def test_every_pair_has_its_place_and_each_word_its_meaning() -> None:
    links = {(a, b): NVLINK if {a, b} == {0, 1} else PCIE for a in range(11) for b in range(11) if a != b}
    links[2, 3] = COPY  # one way only
    found = finding(links)
    lines = found.text.splitlines()
    assert lines[1].split() == [f"cuda:{n}" for n in range(11)]
    cells = {line.split()[0]: line.split()[1:] for line in lines[2:13]}
    assert cells["cuda:0"] == ["-", "NVLink", *["PCIe"] * 9]
    assert cells["cuda:2"][:5] == ["PCIe", "PCIe", "-", "copy", "PCIe"]
    assert cells["cuda:3"][2] == "PCIe"
    assert [line.split(":")[0] for line in lines[13:]] == ["NVLink", "PCIe", "copy"]
    assert found.status == WARNING
    assert "copy what you read" in found.advice
    assert lines[2].index("NVLink") == lines[1].index("cuda:1"), "columns align"
