"""pipeline.toml: every mistake in one go, with its key and line; overrides."""

from __future__ import annotations

from pathlib import Path

import pytest

from ipcsync.errors import PipelineInvalid
from ipcsync_workers.pipeline import Pipeline, load

STAGES = """
from ipcsync_workers import per_item
constant = 3
def read(stage): ...
def write(stage): ...
def nothing(): ...
@per_item
def edges(array, out, meta, *, xp, stage, sigma=1.0): ...
@per_item
def needs(array, out, meta, *, strength): ...
@per_item
def short(array, out): ...
"""
GOOD = """
[pipeline]
name = "photos"
[channels.frames]
shape = [8, 8, 3]
dtype = "uint8"
[channels.edges]
fields = { a = { shape = [8], dtype = "float32" }, b = { shape = [], dtype = "bfloat16" } }
depth = 2
[stages.read]
call = "some:read"
outputs = ["frames"]
params = { folder = "images", depth = 3 }
[stages.edges]
call = "some:edges"
inputs = ["frames"]
outputs = ["edges"]
params = { sigma = 2 }
restart = "on-failure"
[stages.write]
call = "some:write"
inputs = ["edges"]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "some.py").write_text(STAGES)
    (tmp_path / "loud.py").write_text(
        "print('to stdout')\nimport os\nos.write(2, b'to stderr')\nraise ValueError('no')"
    )
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(5)")
    (tmp_path / "needy.py").write_text("import surely_not_installed")
    return tmp_path


def read(folder: Path, text: str = GOOD, *overrides: str) -> Pipeline:
    (folder / "pipeline.toml").write_text(text)
    return load(folder / "pipeline.toml", overrides)


def mistakes(folder: Path, text: str, *overrides: str) -> list[tuple[int, str, str]]:
    with pytest.raises(PipelineInvalid) as caught:
        read(folder, text, *overrides)
    for line, key, message in caught.value.problems:
        shown = f"pipeline.toml:{line}: {key}: {message}" if line else f"--set {key}: {message}"
        assert shown in str(caught.value)
    return caught.value.problems


def line_of(text: str, part: str) -> int:
    return text[: text.index(part)].count("\n") + 1


def test_a_right_file_is_read(folder):
    pipeline = read(folder)
    assert pipeline.settings.name == "photos"
    assert pipeline.folder == folder
    assert pipeline.channels["frames"].shape == (8, 8, 3)
    assert pipeline.channels["edges"].fields["b"].dtype == "bfloat16"
    assert pipeline.stages["edges"].restart == "on-failure"
    assert pipeline.calls["some:edges"].per_item
    assert pipeline.device(pipeline.stages["edges"]) is None


# each is (what is changed, into what, the key of the one mistake, a part of its message, a part of its line)
ONE_MISTAKE = [
    ('name = "photos"', 'nam = "photos"', "pipeline.nam", "did you mean 'name'", "nam ="),
    ('name = "photos"', 'name = "two words"', "pipeline.name", "letters", "name ="),
    ('name = "photos"', 'device = "gpu"', "pipeline.device", "'cuda:N'", "device ="),
    ("[channels.frames]", "[channel.frames]", "channel", "did you mean 'channels'", "[channel.frames]"),
    ("shape = [8, 8, 3]", "shape = [8, 0, 3]", "channels.frames.shape", "at least 1", "shape = [8, 0"),
    ("shape = [8, 8, 3]", "shape = [8, -1]", "channels.frames.shape", "at least 1", "shape = [8, -1"),
    ("shape = [8, 8, 3]", "shape = 8", "channels.frames.shape", "a list", "shape = 8"),
    ("shape = [8, 8, 3]", "", "channels.frames.shape", "missing", "[channels.frames]"),
    ('dtype = "uint8"', 'dtype = "uint9"', "channels.frames.dtype", "did you mean 'uint8'", "dtype = "),
    ('dtype = "uint8"', 'dtype = "object"', "channels.frames.dtype", "no data type", "dtype = "),
    ("depth = 2", "depth = 1", "channels.edges.depth", "from 2", "depth = 1"),
    ("depth = 2", "depth = true", "channels.edges.depth", "from 2", "depth = true"),
    ("depth = 2", "shape = [1]", "channels.edges.fields", "not both", "fields ="),
    ("depth = 2", "depht = 2", "channels.edges.depht", "did you mean 'depth'", "depht"),
    ("shape = [8],", "shape = [0],", "channels.edges.fields.a.shape", "at least 1", "fields ="),
    ('call = "some:read"', "", "stages.read.call", "missing", "[stages.read]"),
    ('call = "some:read"', 'call = "read"', "stages.read.call", "module:function", 'call = "read"'),
    ('call = "some:read"', 'call = "some:red"', "stages.read.call", "did you mean 'read'", "some:red"),
    ('call = "some:read"', 'call = "som:read"', "stages.read.call", "did you mean 'some'", "som:read"),
    ('call = "some:read"', 'call = "some:constant"', "stages.read.call", "not a function", "some:constant"),
    ('call = "some:read"', 'call = "some:nothing"', "stages.read.call", "one argument, the stage", "some:nothing"),
    ('call = "some:read"', 'call = "loud:read"', "stages.read.call", "ValueError: no (loud.py line 4)", "loud"),
    ('call = "some:read"', 'call = "leaves:read"', "stages.read.call", "SystemExit", "leaves"),
    ('call = "some:read"', 'call = "needy:read"', "stages.read.call", "surely_not_installed", "needy"),
    ('outputs = ["edges"]', 'outputs = ["edge"]', "stages.edges.outputs", "did you mean 'edges'", '["edge"]'),
    ('call = "some:edges"', 'call = "some:short"', "stages.edges.call", "(array, out, meta)", "some:short"),
    ("sigma = 2", "sigmas = 2", "stages.edges.params.sigmas", "did you mean 'sigma'", "sigmas"),
    ('restart = "on-failure"', 'restart = "always"', "stages.edges.restart", "'on-failure'", "always"),
    ('inputs = ["edges"]', 'inputs = "edges"', "stages.write.inputs", 'inputs = ["edges"]', 'inputs = "edges"'),
    ('inputs = ["edges"]', 'inputs = ["edges", "edges"]', "stages.write.inputs", "twice", '"edges", "edges"'),
    ('inputs = ["edges"]', 'inputs = ["edges"]\nreplicas = 0', "stages.write.replicas", "from 1", "replicas"),
]


@pytest.mark.parametrize(("before", "after", "key", "message", "at"), ONE_MISTAKE, ids=[m[1] for m in ONE_MISTAKE])
def test_a_mistake_is_named_with_its_key_and_line(folder, before, after, key, message, at):
    assert GOOD.count(before) == 1
    text = GOOD.replace(before, after)
    found = mistakes(folder, text)
    assert (line_of(text, at), key) in [(line, name) for line, name, _ in found]
    (said,) = [what for _, name, what in found if name == key]
    assert message in said


def test_all_mistakes_are_found_in_one_run(folder):
    text = """
[pipeline]
nmae = "x"
[channels.frames]
shape = [0]
dtype = "uint8"
[channels.unused]
shape = [1]
dtype = "uint8"
[channels.loop]
shape = [1]
dtype = "uint8"
[stages.read]
call = "some:read"
outputs = ["frames"]
[stages.again]
call = "some:read"
outputs = ["frames"]
[stages.first]
call = "some:needs"
inputs = ["loop"]
outputs = ["loop"]
[stages.last]
call = "nowhere:write"
inputs = ["missing"]
"""
    found = {(line, key): what for line, key, what in mistakes(folder, text)}
    assert list(found) == [
        (3, "pipeline.nmae"),
        (5, "channels.frames.shape"),
        (7, "channels.unused"),
        (18, "stages.again.outputs"),
        (19, "stages.first.params"),
        (21, "stages.first.inputs"),
        (24, "stages.last.call"),
        (25, "stages.last.inputs"),
    ]
    assert "'read'" in found[18, "stages.again.outputs"]
    assert "first -> first" in found[21, "stages.first.inputs"]


def test_a_long_cycle_is_named_once_in_the_order_of_flow(folder):
    ring = "".join(f"[channels.c{i}]\nshape = [1]\ndtype = 'uint8'\n" for i in range(3))
    ring += "".join(
        f"[stages.s{i}]\ncall = 'some:read'\ninputs = ['c{i}']\noutputs = ['c{(i + 1) % 3}']\n" for i in range(3)
    )
    found = mistakes(folder, ring)
    assert [what for _, _, what in found] == ["a cycle: s0 -> s1 -> s2 -> s0"]


def test_a_read_channel_that_nobody_writes(folder):
    text = GOOD.replace('outputs = ["frames"]', "")
    assert [(key, what) for _, key, what in mistakes(folder, text)] == [("channels.frames", "no stage writes it")]


@pytest.mark.parametrize(
    ("text", "line", "part"),
    [("a = [1\n", 2, ""), ("[pipeline]\nx = = 1\n", 2, "line 2"), ("a = 1\na = 2\n", 2, "overwrite"), ("", 1, "stage")],
)
def test_a_file_that_is_no_pipeline(folder, text, line, part):
    ((at, _, what),) = mistakes(folder, text)
    assert at in (line, line - 1)
    assert part in what


def test_no_file(tmp_path):
    with pytest.raises(PipelineInvalid, match="no such file"):
        load(tmp_path / "none.toml")
    with pytest.raises(PipelineInvalid, match="cannot be read"):
        load(tmp_path)


# -- overrides


def test_an_override_is_toml_or_text(folder):
    plan = read(
        folder,
        GOOD,
        "stages.read.params.folder=2024",  # the file has text there: text it stays
        "stages.read.params.depth=5",
        "stages.read.params.new=[1, 2]",
        "stages.read.params.word=plain words",
        "stages.read.params.deep.er=true",
        "channels.edges.depth=7",
        "pipeline.device=cpu",
    )
    params = plan.stages["read"].params
    assert params == {"folder": "2024", "depth": 5, "new": [1, 2], "word": "plain words", "deep": {"er": True}}
    assert plan.channels["edges"].depth == 7
    assert plan.settings.device == "cpu"


def test_a_path_of_an_override_is_the_shells_where_it_says_so(folder, tmp_path_factory, monkeypatch):
    here = tmp_path_factory.mktemp("here")
    (here / "only-here").mkdir()
    (here / "both").mkdir()
    (folder / "both").mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", "/home/someone")

    def folder_of(value: str) -> str:
        return read(folder, GOOD, f"stages.read.params.folder={value}").stages["read"].params["folder"]

    assert folder_of("./new") == str(here / "new")
    assert folder_of("../x") == str(here / ".." / "x")
    assert folder_of("~/x") == "/home/someone/x"
    assert folder_of("only-here") == str(here / "only-here")
    assert folder_of("both") == "both"  # relative to the file, as everything in it
    assert folder_of("neither") == "neither"
    assert folder_of("/absolute") == "/absolute"


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("nonsense", "key=value"),
        ("=1", "key=value"),
        ("stages.reed.params.x=1", "did you mean 'read'"),
        ("channels.none.depth=3", "no 'channels.none'"),
        ("stages.read.calll=x", "did you mean 'call'"),
        ("channels.frames.shape=[1, 0]", "at least 1"),
        ("stages.read.params.folder.x=1", "no table"),
    ],
)
def test_a_wrong_override_is_named_as_one(folder, override, part):
    ((line, _, what),) = mistakes(folder, GOOD, override)
    assert line == 0
    assert part in what
