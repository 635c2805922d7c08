"""Multipart forms: read back as they were written, and refused where they are none."""

import pytest

from backend_client.errors import PayloadTooLarge, RequestRejected
from backend_client.http import messages

KIND = "multipart/form-data; boundary=xyz"
FILE = b'--xyz\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF\r\n'


@pytest.mark.parametrize("content", [b"RIFF", b"\r\n", b"--xyz", b"\r\n\r\n\x00\xff--" * 1000, b"\r", b"\n"])
def test_a_form_is_read_as_it_was_written(content):
    fields = {"model": "listener", "prompt": "Zürich\r\n\r\n–", "timestamp_granularities[]": ["word", "segment"]}
    body, kind = messages.encode_form(fields, "a.wav", content)
    read, file = messages.read_form(body, kind)
    assert file == ("a.wav", content)
    assert read == {name: value if isinstance(value, list) else [value] for name, value in fields.items()}


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"{}", "application/json"),
        (FILE + b"--xyz--\r\n", "multipart/form-data"),
        (FILE + b"--xyz--\r\n", "multipart/mixed; boundary=xyz"),
        (FILE + b"--xyz--\r\n", "multipart/form-data; boundary=other"),
        (FILE, KIND),
        (b"", KIND),
        (b"--xyz--\r\n", KIND),
        (FILE + FILE.replace(b"RIFF", b"\xff") + b"--xyz--\r\n", KIND),
        (b"--xyz\r\n\r\nno name\r\n" + FILE + b"--xyz--\r\n", KIND),
        (b"--xyz\r\nContent-Disposition: form-data; name\r\n\r\n" + FILE + b"--xyz--\r\n", KIND),
        (FILE * 100 + b"--xyz--\r\n", KIND),
        (b"\xff\x00" + FILE, "\xff\x00"),
    ],
)
def test_what_is_no_form_with_a_file_is_refused(body, kind):
    with pytest.raises(RequestRejected):
        messages.read_form(body, kind)


def test_a_form_that_is_too_long_is_refused(monkeypatch):
    monkeypatch.setattr(messages, "MOST_BYTES", 10)
    with pytest.raises(PayloadTooLarge):
        messages.read_form(FILE + b"--xyz--\r\n", KIND)
