"""Which addresses are public, and which hosts an entry of `allow_image_hosts` means."""

import pytest

from worker_node.settings import NodeSettings
from worker_node.settings.node import ImageHost
from worker_node.tasks.generate.http.remote_images import is_public


@pytest.mark.parametrize("address", ["93.184.216.34", "2606:2800:220:1::1", "::ffff:8.8.8.8"])
def test_addresses_of_the_internet_are_public(address):
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.255.255.254",
        "10.0.0.1",
        "172.16.0.1",
        "192.168.1.1",
        "100.64.0.1",
        "169.254.169.254",
        "0.0.0.0",  # noqa: S104  (nothing is bound)
        "255.255.255.255",
        "224.0.0.1",
        "240.0.0.1",
        "192.0.2.1",
        "198.18.0.1",
        "::",
        "::1",
        "fe80::1",
        "fe80::1%eth0",
        "fd00::1",
        "ff02::1",
        "2001:db8::1",
        # IPv4 addresses in IPv6 ones: mapped, compatible, 6to4, Teredo, and those that gateways translate.
        "::ffff:127.0.0.1",
        "::ffff:7f00:1",
        "::ffff:10.0.0.1",
        "::127.0.0.1",
        "2002:7f00:1::1",
        "2002:a00:1::1",
        "2001:0:808:808::80ff:fffe",
        "64:ff9b::7f00:1",
        "64:ff9b:1::a00:1",
        "64:ff9b::808:808",
        # For a site, for examples.
        "fec0::1",
        "3fff::1",
        "localhost",
        "",
    ],
)
def test_no_other_address_is_public(address):
    assert not is_public(address)


@pytest.mark.parametrize(
    ("entry", "meant", "others"),
    [
        (
            "Images.Example",
            [("https", "images.example", 443)],
            [
                ("http", "images.example", 80),
                ("http", "images.example", 443),
                ("https", "images.example", 8443),
                ("https", "a.images.example", 443),
                ("https", "images.example.evil", 443),
                ("https", "evilimages.example", 443),
            ],
        ),
        (
            "*.example",
            [("https", "a.example", 443), ("https", "a.b.example", 443)],
            [("https", "example", 443), ("https", "badexample", 443), ("https", "a.example.org", 443)],
        ),
        ("*", [("https", "anything", 443), ("https", "93.184.216.34", 443)], [("http", "anything", 80)]),
        ("images.example:8443", [("https", "images.example", 8443)], [("https", "images.example", 443)]),
        ("http://10.0.0.5:8080", [("http", "10.0.0.5", 8080)], [("https", "10.0.0.5", 8080), ("http", "10.0.0.5", 80)]),
        ("http://images.example", [("http", "images.example", 80)], [("https", "images.example", 443)]),
        ("https://[fd00::1]:8443", [("https", "fd00::1", 8443)], [("https", "fd00::2", 8443)]),
    ],
)
def test_an_entry_means_its_scheme_host_and_port(entry, meant, others):
    host = ImageHost.parse(entry)
    assert all(host.covers(*place) for place in meant)
    assert not any(host.covers(*place) for place in others)


@pytest.mark.parametrize(
    ("entry", "private"),
    [("a.example", False), ("http://a.example", False), ("*:443", False), ("*.a:443", False), ("a.example:443", True)],
)
def test_only_one_host_with_its_port_may_be_private(entry, private):
    assert ImageHost.parse(entry).may_be_private is private


@pytest.mark.parametrize(
    "entry", ["", "ftp://a", "a b", "a/b", "a:0", "a:65536", "u@a", "*a", "a:b", "http://", "[::1"]
)
def test_what_is_no_host_is_refused_in_the_settings(entry):
    with pytest.raises(ValueError, match=r"images\.example"):
        NodeSettings(allow_image_hosts=[entry])
