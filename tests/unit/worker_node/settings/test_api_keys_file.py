"""Keys that come in a file, as a service manager hands them over."""

import pytest

from worker_node.settings import InvalidSettings, parse_settings


@pytest.fixture
def keys_file(tmp_path):
    path = tmp_path / "api_keys"
    path.write_text("# team a\nalpha\n\n  beta  \n", encoding="utf-8")
    return path


def keys(settings):
    return [key.get_secret_value() for key in settings.api_keys]


def test_every_line_is_a_key_and_comments_are_not(keys_file):
    assert keys(parse_settings("", flags={"api_keys_file": keys_file})) == ["alpha", "beta"]


@pytest.mark.parametrize("given", ["gamma,delta", ("gamma", "delta")])
def test_they_add_to_those_given_otherwise(keys_file, given):
    assert keys(parse_settings("", flags={"api_keys_file": keys_file, "api_keys": given})) == [
        "gamma",
        "delta",
        "alpha",
        "beta",
    ]


def test_the_environment_names_the_file(keys_file, monkeypatch):
    monkeypatch.setenv("NPU_NODE_API_KEYS_FILE", str(keys_file))
    assert keys(parse_settings("")) == ["alpha", "beta"]


def test_they_open_an_address_that_others_reach(keys_file):
    assert parse_settings("", flags={"api_keys_file": keys_file, "host": "0.0.0.0"}).host == "0.0.0.0"  # noqa: S104


def test_a_file_that_is_missing_stops_the_node(tmp_path):
    with pytest.raises(InvalidSettings, match=r"api_keys_file .*gone cannot be read: No such file"):
        parse_settings("", flags={"api_keys_file": tmp_path / "gone"})


@pytest.mark.parametrize("content", [b"", b"\n# none yet\n"])
def test_a_file_without_a_key_stops_the_node(tmp_path, content):
    path = tmp_path / "api_keys"
    path.write_bytes(content)
    with pytest.raises(InvalidSettings, match="holds no key"):
        parse_settings("", flags={"api_keys_file": path})


def test_no_part_of_a_file_is_shown(tmp_path):
    path = tmp_path / "api_keys"
    path.write_bytes(b"s3cret\xff\n")
    with pytest.raises(InvalidSettings) as caught:
        parse_settings("", flags={"api_keys_file": path})
    assert "not UTF-8" in str(caught.value)
    assert "s3cret" not in str(caught.value)
