"""The photo example's pictures: any size and mode is read, and the filter is what it says."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

Image = pytest.importorskip("PIL.Image")

PHOTOS = Path(__file__).parents[2] / "docs" / "examples" / "photos"


@pytest.fixture(scope="module")
def imaging():
    sys.path.insert(0, str(PHOTOS))
    try:
        import imaging
    finally:
        sys.path.remove(str(PHOTOS))
    return imaging


def saved(folder: Path, picture, name: str = "x.png", **options) -> Path:
    picture.save(folder / name, **options)
    return folder / name


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "I;16", "I", "F", "HSV"])
def test_every_mode_is_read(imaging, tmp_path, mode):
    ramp = np.linspace(0, 255, 20 * 30).reshape(20, 30)
    if mode == "I;16":
        picture = Image.fromarray((ramp * 257).astype(np.uint16))
    elif mode in ("I", "F"):
        picture = Image.fromarray(ramp.astype(np.int32 if mode == "I" else np.float32))
    else:
        picture = Image.fromarray(ramp.astype(np.uint8)).convert("RGB").convert("L" if mode == "PA" else mode)
    rgb = np.asarray(imaging.to_rgb(picture.convert("PA") if mode == "PA" else picture))
    assert rgb.shape == (20, 30, 3)
    assert rgb.dtype == np.uint8
    assert rgb[0, 0].max() <= 8
    assert rgb[-1, -1].min() >= 247


def test_sixteen_bits_keep_their_upper_eight(imaging, tmp_path):
    values = np.array([[0, 0x1234], [0x8000, 0xFFFF]], np.uint16)
    path = saved(tmp_path, Image.fromarray(values))
    assert imaging.load(path, 2, 2)[..., 0].tolist() == [[0, 0x12], [0x80, 0xFF]]


def test_what_is_transparent_is_white(imaging, tmp_path):
    clear = saved(tmp_path, Image.new("RGBA", (4, 4), (10, 20, 30, 0)))
    assert (imaging.load(clear, 4, 4) == 255).all()
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, 200, 0, 0])
    path = saved(tmp_path, palette, "p.png", transparency=1)
    assert (imaging.load(path, 4, 4) == 255).all()


def test_a_rotated_photograph_is_turned_upright(imaging, tmp_path):
    wide = np.zeros((10, 20, 3), np.uint8)
    wide[:, :10] = 255  # white on the left
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned a quarter clockwise: left becomes top
    path = saved(tmp_path, Image.fromarray(wide), "x.png", exif=exif)
    upright = imaging.load(path, 20, 10)
    assert upright[5].min() > 200
    assert upright[15].max() < 50


@pytest.mark.parametrize(("size", "bars"), [((100, 50), "rows"), ((50, 100), "columns"), ((1, 1), ""), ((64, 64), "")])
def test_letterboxed_to_any_frame(imaging, tmp_path, size, bars):
    path = saved(tmp_path, Image.new("RGB", size, "white"))
    picture = imaging.load(path, 64, 64)
    assert picture.shape == (64, 64, 3)
    assert (picture[32, 32] == 255).all()
    assert picture[0, 32, 0] == (0 if bars == "rows" else 255)
    assert picture[32, 0, 0] == (0 if bars == "columns" else 255)
    assert (imaging.load(path, 64, 64, "stretch") == 255).all()


@pytest.mark.parametrize("content", [b"", b"plain text", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0", b"GIF89a"])
def test_no_image_is_said_to_be_none(imaging, tmp_path, content):
    (tmp_path / "x.jpg").write_bytes(content)
    with pytest.raises(imaging.NotAnImage):
        imaging.load(tmp_path / "x.jpg", 8, 8)


def test_a_picture_that_is_cut_off_is_no_image(imaging, tmp_path):
    whole = (PHOTOS / "images" / "chelsea.png").read_bytes()
    (tmp_path / "half.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(imaging.NotAnImage):
        imaging.load(tmp_path / "half.png", 8, 8)


def test_names_are_stems_unless_two_would_be_the_same(imaging, tmp_path):
    paths = [tmp_path / name for name in ("a.jpg", "a.png", "b.png")]
    assert list(imaging.names(paths).values()) == ["a.jpg", "a.png", "b"]


def test_flat_has_no_edges_and_a_step_has_one_of_its_height(imaging):
    flat = np.full((16, 16, 3), 77, np.uint8)
    assert not imaging.find_edges(flat).any()
    step = np.zeros((16, 16, 3), np.uint8)
    step[:, 8:] = 255
    edges = imaging.find_edges(step)
    assert (edges == edges[0]).all()  # the same in every row
    assert edges[0, 7:9].tolist() == [255, 255]
    assert not edges[0, :4].any()
    assert not edges[0, 12:].any()
    assert (imaging.find_edges(step.transpose(1, 0, 2)) == edges.T).all()


def test_the_filter_is_the_textbooks_in_whole_numbers(imaging):
    """A direct convolution in floating point gives the same, but for two roundings times Sobel's weights."""
    picture = np.random.default_rng(1).integers(0, 256, (24, 31, 3), np.uint8)
    grey = picture @ np.array([0.299, 0.587, 0.114])
    gauss = np.outer([1, 4, 6, 4, 1], [1, 4, 6, 4, 1]) / 256
    blurred = convolve(grey, gauss)
    sobel = np.array([[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]])
    expected = np.minimum(np.hypot(convolve(blurred, sobel), convolve(blurred, sobel.T)), 255)
    assert np.abs(imaging.find_edges(picture) - expected).max() <= 6


def convolve(picture, kernel):
    reach = len(kernel) // 2
    padded = np.pad(picture, reach, mode="edge")
    height, width = picture.shape
    return sum(weight * padded[i : i + height, j : j + width] for (i, j), weight in np.ndenumerate(kernel))
