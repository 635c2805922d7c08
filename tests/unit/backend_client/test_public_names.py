"""What the package promises by name."""

import importlib
import inspect
import subprocess
import sys

import pytest

import backend_client
from backend_client import errors
from backend_client.options import RetryOptions

PUBLIC = """
    AsyncInferenceClient AsyncNPUClient ChatResult ClientOptions ClientSettings CloudClient CloudSettings
    ConfigurationError EmbedManyResult EmbedResult GenerateResult InferenceClient InvalidArgument NPUClient NPUError
    NPUUnavailableError NodeStatus RequestRejected RerankResult StreamInterrupted Transcription openai
"""


def test_the_public_names_are_these():
    assert backend_client.__all__ == PUBLIC.split()
    for name in backend_client.__all__:
        assert getattr(backend_client, name) is not None


@pytest.mark.parametrize(
    ("name", "place"),
    [("FleetOverloaded", "errors"), ("Usage", "results"), ("ChatStream", "streams"), ("Ledger", "cloud")],
)
def test_a_name_that_has_moved_is_still_found_with_a_warning(name, place):
    with pytest.warns(DeprecationWarning, match=f"from backend_client.{place}"):
        moved = getattr(backend_client, name)
    assert moved is getattr(importlib.import_module(f"backend_client.{place}"), name)


def test_a_group_of_settings_is_found_at_its_old_name_with_a_warning():
    with pytest.warns(DeprecationWarning, match=r"backend_client\.options\.RetryOptions"):
        assert backend_client.settings.RetrySettings is RetryOptions


MODULES = ["cloud", "observability", "sync", "testing"]


def test_public_modules_are_there_once_the_package_is_imported():
    """Each in a fork of its own, for importing one may import another."""
    program = f"""
import os, backend_client
for name in {MODULES}:
    if os.fork() == 0:
        print(getattr(backend_client, name).__name__, flush=True)
        os._exit(0)
    os.wait()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [f"backend_client.{name}" for name in MODULES]


def test_a_name_that_is_not_there_is_no_module():
    for name in ("nothing", "Sequence", "dataclass"):
        with pytest.raises(AttributeError):
            getattr(backend_client, name)


def test_the_errors_are_the_tree_of_their_docstring():
    ancestors = {}
    for line in (errors.__doc__ or "").splitlines():
        name = line.strip("│├└─ ").split(" ")[0]
        depth = (len(line) - len(line.lstrip("│├└─ "))) // 4
        if name[:1].isupper() and hasattr(errors, name):
            ancestors[depth] = name
            if depth > 1:
                assert issubclass(getattr(errors, name), getattr(errors, ancestors[depth - 1])), name
    drawn = {word for line in (errors.__doc__ or "").splitlines() for word in line.split()}
    for name, kind in inspect.getmembers(errors, inspect.isclass):
        if issubclass(kind, errors.NPUError):
            assert name in drawn, name


def test_the_openai_sdk_is_not_imported_for_those_who_have_no_cloud():
    program = "import sys, backend_client.cli.main; sys.exit('openai' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
