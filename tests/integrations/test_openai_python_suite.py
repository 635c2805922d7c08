"""openai-python's own tests of its API resources, of the version that is installed, against a node.

They come with its source distribution and were written for a mock server, so they name OpenAI's models: the node serves
its own under these names.
"""

import json
import sys
import tarfile
from importlib.metadata import version

import pytest

from tests.support.foreign import kept, pip, run_suite
from tests.support.nodes import start_node

pytestmark = [pytest.mark.real, pytest.mark.timeout(600), pytest.mark.usefixtures("store")]

VERSION = version("openai")
MODELS = [
    {"name": "all-minilm-l6-v2", "aliases": ["text-embedding-3-small"]},
    # The answers' length is left open by the tests, and of no interest here.
    {
        "name": "smollm2-135m-instruct",
        "aliases": ["gpt-6-astra", "gpt-3.5-turbo-instruct"],
        "max_tokens_limit": 16,
    },
]
FILES = ("test_embeddings.py", "test_models.py", "test_completions.py", "chat/test_completions.py")

# The client checks each reply against its types; it takes embeddings so only by loose ones.
STRICT = "addopts=-k 'strict or embeddings'"


def everything(*verbs):
    """The tests of a verb: the plain one, and those of raw and of streamed responses."""
    return [f"test_{form}_{verb}" for verb in verbs for form in ("method", "raw_response", "streaming_response")]


# With every parameter at once the request asks for what the node refuses, as it must: dimensions=1, best_of=0, echo,
# suffix, audio, functions, prediction, store, web search and max_tokens=0. Refusals have tests of their own.
EVERY_PARAMETER = [f"test_method_create_with_all_params_overload_{number}" for number in (1, 2)]
LEFT_OUT = {
    ("test_embeddings.py", "Embeddings"): [
        "test_method_create_with_all_params",
        # The client asks for base64 by itself, as it does at OpenAI, and its strict mode then takes lists only.
        *(f"{test}[{mode}]" for test in everything("create") for mode in ("strict", "aiohttp")),
    ],
    # OpenAI's API deletes fine-tuned models only; here it is DELETE /api/delete.
    ("test_models.py", "Models"): everything("delete"),
    ("test_completions.py", "Completions"): EVERY_PARAMETER,
    # Nothing is stored here.
    ("chat/test_completions.py", "Completions"): [
        *EVERY_PARAMETER,
        *everything("retrieve", "update", "list", "delete"),
        "test_method_list_with_all_params",
    ],
}


def source():
    def make(directory):
        wanted = ("--no-deps", "--no-binary=openai", f"openai=={VERSION}")
        pip(sys.executable, "download", f"--dest={directory}", *wanted)
        with tarfile.open(directory / f"openai-{VERSION}.tar.gz") as opened:
            opened.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4 and newer have it
            opened.extractall(directory)  # noqa: S202

    return kept(f"openai-{VERSION}-source", make) / f"openai-{VERSION}"


def deselected():
    """Each test that is left out, for the client and for the asynchronous one, with several transports."""
    return [
        f"tests/api_resources/{name}::Test{kind}{resource}::{test if '[' in test else test + '['}"
        for (name, resource), tests in LEFT_OUT.items()
        for test in tests
        for kind in ("", "Async")
    ]


def test_openai_pythons_own_tests(tmp_path, long, quick_models):
    # More than 5 s: a node with names of its own starts, and 52 tests run; with --long 121: the others repeat the same
    # requests with the client's other transports and without its validation.
    root = source()
    with start_node(NPU_NODE_MODELS=json.dumps(MODELS), **quick_models) as node:
        outcome = run_suite(
            sys.executable,
            [f"tests/api_resources/{name}" for name in FILES],
            root,
            tmp_path / "report.xml",
            deselected=deselected(),
            settings=["asyncio_mode=auto", "asyncio_default_fixture_loop_scope=session", *([] if long else [STRICT])],
            TEST_API_BASE_URL=node.url + "/v1",
        )
    assert outcome.failed == 0, outcome.told
    expected = (121, 114, 0) if long else (52, 183, 0)
    assert (outcome.passed, outcome.deselected, outcome.skipped) == expected, outcome.told
