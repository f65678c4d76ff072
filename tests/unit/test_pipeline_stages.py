"""The ready-made stages, on numpy and, where there is a GPU, on cupy."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

from ipcsync.errors import InvalidArgument, InvalidState
from ipcsync_workers.stages import arrays, filters, images, statistics, synthetic, video
from ipcsync_workers.testing import run_stage

Image = pytest.importorskip("PIL.Image")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
RNG = np.random.default_rng(7)


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def one(function, array, like, device="cpu", **params):
    (item,) = run_stage(function, inputs=[array], output=like, params=params, device=device)
    return item.array


# -- pictures


@pytest.fixture
def pictures(tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    red = np.zeros((10, 20, 3), np.uint8)
    red[..., 0] = 200
    Image.fromarray(red).save(folder / "a.png")
    Image.fromarray(red[..., 0]).save(folder / "b.PNG")
    Image.fromarray(red).save(folder / "b.bmp")
    (folder / "c.jpg").write_bytes(b"no picture")
    (folder / "notes.txt").write_text("none either")
    return folder


def test_the_pictures_of_a_folder(pictures, device):
    like = np.full((20, 20, 3), 9, np.uint8)
    found = run_stage(images.read, output=like, params={"folder": str(pictures)}, device=device)
    assert [item.meta for item in found] == [
        {"name": "a", "file": "a.png"},
        {"name": "b.PNG", "file": "b.PNG"},
        {"name": "b.bmp", "file": "b.bmp"},
    ]
    a, b, _ = (item.array for item in found)
    assert a[10, 10].tolist() == [200, 0, 0]
    assert a[0, 10].tolist() == [0, 0, 0]  # a bar above
    assert b[10, 10].tolist() == [200, 200, 200]


@pytest.mark.parametrize(("fit", "corner"), [("stretch", 200), ("crop", 200), ("letterbox", 0)])
def test_how_a_picture_is_fitted(pictures, fit, corner):
    like = np.full((20, 20), 9, np.uint8)
    found = run_stage(images.read, output=like, params={"folder": str(pictures), "fit": fit})
    assert found[1].array[0, 0] == corner
    assert found[1].array[10, 10] == 200


def test_reading_pictures_goes_on_after_those_that_were_published(pictures):
    (pictures / "0.png").write_bytes(b"no picture")  # passed over in the first life, and so not counted
    like, params = np.zeros((4, 4, 3), np.uint8), {"folder": str(pictures)}
    for before, left in ((1, ["b.PNG", "b.bmp"]), (2, ["b.bmp"]), (3, [])):
        found = run_stage(images.read, output=like, params=params, resumed_at=before)
        assert [item.meta["name"] for item in found] == left


def test_what_is_wrong_with_a_folder_or_a_channel_is_said(pictures, tmp_path):
    with pytest.raises(InvalidArgument, match=r"is no folder: name one with --set stages\.read\.params\.folder"):
        run_stage(images.read, output=np.zeros((4, 4, 3), np.uint8), params={"folder": str(tmp_path / "none")})
    with pytest.raises(InvalidArgument, match="fit is one of"):
        run_stage(images.read, params={"folder": str(pictures), "fit": "squeeze"})
    with pytest.raises(InvalidArgument, match=r"not \(4, 4, 4\)"):
        run_stage(images.read, output=np.zeros((4, 4, 4), np.uint8), params={"folder": str(pictures)})


def test_pictures_are_written_and_read_again(tmp_path):
    given = RNG.integers(0, 256, (8, 6, 3), np.uint8)
    folder = {"folder": str(tmp_path / "out")}
    run_stage(images.write, inputs=[(given, {"name": "x/y"}), given[..., 0]], params=folder)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["000002.png", "x_y.png"]
    (grey, _) = run_stage(images.read, output=np.zeros((8, 6), np.uint8), params={**folder, "fit": "stretch"})
    assert (grey.array == given[..., 0]).all()
    with pytest.raises(InvalidArgument, match="of uint8, not float32"):
        run_stage(images.write, inputs=[given.astype(np.float32)], params=folder)
    run_stage(images.write, inputs=[given], params={**folder, "format": "jpeg"})
    assert (tmp_path / "out" / "000001.jpg").read_bytes()[:2] == b"\xff\xd8"


# -- arrays


def test_arrays_are_written_and_read_again(tmp_path, device):
    params = {"folder": str(tmp_path / "arrays")}
    given = [(RNG.random((3, 4)).astype(np.float32), {"name": name}) for name in "ba"]
    run_stage(arrays.write, inputs=given, params=params)
    found = run_stage(arrays.read, output=np.zeros((5, 4), np.float32), params=params, device=device)
    assert [item.meta["name"] for item in found] == ["a", "b"]
    assert [item.array.shape for item in found] == [(3, 4), (3, 4)]  # smaller than the channel
    assert (found[1].array == given[0][0]).all()
    found = run_stage(arrays.read, output=np.zeros((5, 4), np.float32), params=params, resumed_at=1)
    assert [item.meta["name"] for item in found] == ["b"]


def test_arrays_with_fields(tmp_path):
    params = {"folder": str(tmp_path)}
    given = {"ids": np.arange(4), "mask": np.array([True, False])}
    run_stage(arrays.write, inputs=[given], params=params)
    like = {"ids": np.zeros(4, np.int64), "mask": np.zeros(2, bool)}
    (item,) = run_stage(arrays.read, output=like, params=params)
    assert item["ids"].tolist() == [0, 1, 2, 3]
    assert item["mask"].tolist() == [True, False]
    with pytest.raises(InvalidArgument, match="has no array 'more'; it has ids, mask"):
        run_stage(arrays.read, output={**like, "more": np.zeros(1)}, params=params)


def test_an_array_that_does_not_fit(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((2, 2)))
    with pytest.raises(InvalidArgument, match=r"x\.npy has 2 axes of float64, the channel 1 of float32"):
        run_stage(arrays.read, output=np.zeros(4, np.float32), params={"folder": str(tmp_path)})
    with pytest.raises(InvalidArgument, match="is one array, and the channel has a, b"):
        run_stage(arrays.read, output={"a": np.zeros(1), "b": np.zeros(1)}, params={"folder": str(tmp_path)})


# -- films


def film(tmp_path, count=10):
    pytest.importorskip("av")
    frames = [np.full((48, 64, 3), 20 * n, np.uint8) for n in range(count)]
    params = {"file": str(tmp_path / "films" / "film.mp4"), "rate": 10}
    run_stage(video.write, inputs=frames, params=params)
    return params["file"]


def test_a_film_is_written_and_read_again(tmp_path, device):
    file = film(tmp_path)
    like = np.zeros((24, 32, 3), np.uint8)
    found = run_stage(video.read, output=like, params={"file": file}, device=device)
    assert [item.meta["frame"] for item in found] == list(range(10))
    assert [item.meta["time"] for item in found] == pytest.approx([n / 10 for n in range(10)])
    for n, item in enumerate(found):
        assert item.array.shape == (24, 32, 3)
        assert abs(int(item.array[12, 16, 1]) - 20 * n) <= 4
    assert len(run_stage(video.read, output=like, params={"file": file, "frames": 3})) == 3
    again = run_stage(video.read, output=like, params={"file": file}, resumed_at=8)
    assert [item.meta["frame"] for item in again] == [8, 9]


def test_what_is_no_film(tmp_path):
    pytest.importorskip("av")
    (tmp_path / "x.mp4").write_bytes(b"none")
    for file in ("x.mp4", "none.mp4"):
        with pytest.raises(InvalidArgument, match="cannot be read as a film"):
            run_stage(video.read, output=np.zeros((4, 4, 3), np.uint8), params={"file": str(tmp_path / file)})
    with pytest.raises(InvalidArgument, match=r"not \(4, 4\) of uint8"):
        run_stage(video.write, inputs=[np.zeros((4, 4), np.uint8)], params={"file": str(tmp_path / "y.mp4")})
    assert not (tmp_path / "y.mp4").exists()
    with pytest.raises(InvalidState, match="restart = 'never'"):
        run_stage(video.write, inputs=[], params={"file": str(tmp_path / "y.mp4")}, resumed_at=1)


def test_there_is_no_film_without_frames(tmp_path):
    with pytest.raises(InvalidState, match="no frame came"):
        film(tmp_path, 0)
    assert list((tmp_path / "films").iterdir()) == []


# -- filters


@pytest.mark.parametrize("method", ["bilinear", "nearest"])
@pytest.mark.parametrize("shape", [(6, 8), (6, 8, 3)])
def test_a_resized_picture_of_the_same_size_is_the_same(method, shape, device):
    given = RNG.integers(0, 256, shape, np.uint8)
    assert (one(filters.resize, given, np.zeros(shape, np.uint8), device, method=method) == given).all()


def test_resize(device):
    ramp = np.repeat(np.arange(8, dtype=np.float32)[None], 4, 0)
    half = one(filters.resize, ramp, np.zeros((2, 4), np.float32), device)
    assert half[0].tolist() == [0.5, 2.5, 4.5, 6.5]
    double = one(filters.resize, ramp, np.zeros((4, 16), np.float32), device)
    assert double[0, :5].tolist() == [0, 0.25, 0.75, 1.25, 1.75]
    assert one(filters.resize, ramp, np.zeros((2, 4), np.float32), device, method="nearest")[1].tolist() == [1, 3, 5, 7]


def test_resize_says_what_it_cannot():
    with pytest.raises(InvalidArgument, match=r"from \(4, 4, 3\) to \(2, 2\)"):
        one(filters.resize, np.zeros((4, 4, 3)), np.zeros((2, 2)))
    with pytest.raises(InvalidArgument, match="'bilinear' or 'nearest', not 'cubic'"):
        one(filters.resize, np.zeros((4, 4)), np.zeros((2, 2)), method="cubic")


def test_normalise(device):
    given = RNG.integers(0, 256, (4, 5, 3), np.uint8)
    like = np.zeros((4, 5, 3), np.float32)
    assert one(filters.normalise, given, like, device) == pytest.approx(given / 255, abs=1e-6)
    mean, std = [0.1, 0.2, 0.3], [0.5, 1.0, 2.0]
    expected = (given / 255 - mean) / std
    assert one(filters.normalise, given, like, device, mean=mean, std=std) == pytest.approx(expected, abs=1e-6)
    first = np.zeros((3, 4, 5), np.float32)
    found = one(filters.normalise, given, first, device, mean=mean, std=std, channels_first=True)
    assert found == pytest.approx(expected.transpose(2, 0, 1), abs=1e-6)
    assert one(filters.normalise, np.full((1, 1), 3.0), np.zeros((1, 1)), device, mean=1, scale=2).tolist() == [[5]]


def test_edges(device):
    flat = np.full((8, 8, 3), 77, np.uint8)
    assert not one(filters.edges, flat, np.ones((8, 8), np.uint8), device).any()
    step = np.zeros((8, 8), np.uint8)
    step[:, 4:] = 10
    found = one(filters.edges, step, np.zeros((8, 8), np.uint8), device)
    assert found.tolist() == [[0, 0, 0, 40, 40, 0, 0, 0]] * 8
    assert one(filters.edges, step.T, np.zeros((8, 8), np.uint8), device, strength=10.0)[3].tolist() == [255] * 8


# -- sinks and sources of numbers


def test_statistics_of_all_items_together(tmp_path, device):
    given = [RNG.normal(1e6, 3, size) for size in (10, 1000, 7)]
    file = tmp_path / "made" / "statistics.json"
    run_stage(statistics.statistics, inputs=given, params={"file": str(file)}, device=device)
    (found,) = json.loads(file.read_text()).values()
    every = np.concatenate(given)
    assert (found["items"], found["elements"]) == (3, 1017)
    assert (found["min"], found["max"]) == (every.min(), every.max())
    assert found["mean"] == pytest.approx(every.mean(), rel=1e-12)
    assert found["std"] == pytest.approx(every.std(), rel=1e-9)


def test_statistics_of_nothing(capsys):
    run_stage(statistics.statistics, inputs=[np.zeros(0)])
    assert json.loads(capsys.readouterr().out)["array"] == {
        "items": 1, "elements": 0, "min": None, "max": None, "mean": None, "std": None,
    }  # fmt: skip


def test_the_synthetic_source_keeps_to_its_rate():
    began = time.monotonic()
    run_stage(synthetic.source, output=np.zeros(4, np.uint8), params={"items": 6, "rate": 100.0})
    assert time.monotonic() - began >= 0.05


def test_the_synthetic_source_goes_on_where_it_was(device):
    like = np.zeros((4, 3), np.float32)
    found = run_stage(synthetic.source, output=like, params={"items": 5}, device=device, resumed_at=3)
    assert [item.meta["index"] for item in found] == [3, 4]
    whole = run_stage(synthetic.source, output=like, params={"items": 5})
    assert (found[0].array.view(np.uint32) == whole[3].array.view(np.uint32)).all()
