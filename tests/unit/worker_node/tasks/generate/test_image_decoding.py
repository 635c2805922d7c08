"""Image files to pixels: formats, sizes, and what is refused by its header."""

import base64
import io
import struct

import numpy as np
import pytest
from PIL import Image

from worker_node.core.errors import BadRequest
from worker_node.tasks.generate.images import decode

RED, GREEN = (255, 0, 0), (0, 255, 0)


def written(image, form, **options):
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def pixels(data, max_pixels=10**6, shortest=None):
    width, height, rows = decode(base64.b64encode(data).decode(), "here", max_pixels, shortest)
    return np.frombuffer(rows, np.uint8).reshape(height, width, 3)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
def test_every_format_has_its_pixels(form):
    found = pixels(written(Image.new("RGB", (64, 40), RED), form, **({"lossless": True} if form == "WEBP" else {})))
    assert found.shape == (40, 64, 3)
    assert np.abs(found.astype(int) - RED).max() <= 2


@pytest.mark.parametrize("form", ["GIF", "WEBP"])
def test_an_animation_is_its_first_frame(form):
    frames = [Image.new("RGB", (40, 40), colour) for colour in (GREEN, RED)]
    found = pixels(written(frames[0], form, save_all=True, append_images=frames[1:]))
    assert np.abs(found[20, 20].astype(int) - GREEN).max() < 50


def test_transparent_parts_are_white():
    image = Image.new("RGBA", (40, 40), (*RED, 255))
    image.paste((0, 0, 0, 0), (0, 0, 20, 40))
    found = pixels(written(image, "PNG"))
    assert tuple(found[20, 5]) == (255, 255, 255)
    assert tuple(found[20, 35]) == RED


def test_sixteen_bits_keep_their_brightness():
    grey = Image.fromarray(np.full((40, 40), 0x8000, np.uint16))
    assert np.all(pixels(written(grey, "PNG")) == 0x80)


def test_a_photograph_is_turned_as_its_camera_was_held():
    exif = Image.Exif()
    exif[0x0112] = 6
    assert pixels(written(Image.new("RGB", (80, 40), RED), "JPEG", exif=exif)).shape == (80, 40, 3)


@pytest.mark.parametrize(
    ("size", "most", "shortest", "shape"),
    [
        ((800, 400), 10**6, None, (400, 800)),
        ((800, 400), 80_000, None, (200, 400)),
        ((800, 400), 10**6, 100, (100, 200)),
        ((8, 4), 10**6, 100, (32, 64)),
    ],
)
def test_images_are_as_large_as_is_of_use(size, most, shortest, shape):
    found = pixels(written(Image.new("RGB", size, RED), "PNG"), most, shortest)
    assert found.shape[:2] == shape
    assert np.all(found == RED)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
@pytest.mark.parametrize("share", [0.02, 0.6, 0.95])
def test_a_cut_file_is_a_bad_request(form, share):
    noise = np.random.default_rng(1).integers(0, 256, (64, 64, 3), np.uint8)
    data = written(Image.fromarray(noise), form)
    with pytest.raises(BadRequest, match=r"here: (the image is truncated|not an image)"):
        pixels(data[: int(len(data) * share)])


@pytest.mark.parametrize("data", [b"", b"hello", b"RIFF0000WEBPVP8X", b"<svg/>", b"BM" + bytes(60), bytes(1000)])
def test_what_is_no_image_is_a_bad_request(data):
    with pytest.raises(BadRequest, match="here: "):
        pixels(data)


@pytest.mark.parametrize("text", ["!!!!", "AAAAA", "AA=A", "ÄÄÄÄ"])
def test_what_is_not_base64_is_a_bad_request(text):
    with pytest.raises(BadRequest, match="here: not base64"):
        decode(text, "here", 1000, None)


@pytest.mark.parametrize("end", ["", "=", "==", "\n"])
def test_line_breaks_and_padding_of_base64_do_not_matter(end):
    data = written(Image.new("RGB", (64, 40), RED), "PNG")
    for size in range(3):
        # What follows a PNG's end counts for nothing, so the text may end at each place of a group.
        lines = base64.encodebytes(data + bytes(size)).decode().replace("\n", "\r\n\t ").rstrip("\r\n\t =")
        assert decode(lines + end, "here", 10**6, None)[:2] == (64, 40)


@pytest.mark.parametrize(
    ("size", "bound"),
    [((20_000, 20_000), "20000 x 20000 pixels; the bound is 50000000"), ((1010, 10), "100 times the shorter")],
)
def test_more_pixels_than_the_bound_and_narrow_images_are_refused_by_the_header(size, bound):
    data = written(Image.new("RGB", (1, 1)), "GIF")
    with pytest.raises(BadRequest, match=f"here: the image has .*{bound}"):
        pixels(data[:6] + struct.pack("<HH", *size) + data[10:])
