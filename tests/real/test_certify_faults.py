"""npu-node certify with real engines finds and names each fault on demand."""

import pytest

from tests.real.certifying import AGREEMENT, EMBEDDER, WRITER, emulated_settings, only, passport_of, run
from tests.real.colour_vision import kept_colours
from tests.support.cross_encoders import write_minilm
from tests.support.whisper import MODEL as WHISPER

pytestmark = [pytest.mark.real, pytest.mark.timeout(900), pytest.mark.usefixtures("store")]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    return emulated_settings(tmp_path_factory.mktemp("certify"))


FAULTS = [
    (EMBEDDER, 'kind = "garbage"\nafter = 1', AGREEMENT, "24 of 24 vectors ("),
    (EMBEDDER, 'kind = "still_counter"', "busy counter", "the busy counter stood still"),
    (EMBEDDER, 'kind = "crash"\nafter = 3', AGREEMENT, "HTTP 50"),
    # Each request is answered by the next engine process.
    (EMBEDDER, 'kind = "lost_device"\nafter = 10', AGREEMENT, "the engine was restarted, 1 times by now"),
    (EMBEDDER, 'kind = "hang"\nafter = 3', AGREEMENT, "HTTP 50"),
    (EMBEDDER, 'kind = "garbage"', "load", "its known question was answered wrongly"),
    (WRITER, 'kind = "garbage"\nafter = 1', AGREEMENT, "wrong answers to prompts of 13, "),
    (WHISPER, 'kind = "stale_audio"\nafter = 1', "two recordings in turn", "the answer to the input before"),
]


@pytest.mark.parametrize(
    ("model", "fault", "check", "said"), FAULTS, ids=lambda value: str(value).replace("\n", " ")[:40]
)
def test_each_fault_on_demand_is_found_and_named(
    tmp_path, emulated, speech_store, quick_models, model, fault, check, said
):
    faults = tmp_path / "faults.toml"
    faults.write_text(f"[[fault]]\n{fault}\n")
    words = ["certify", model, "--config", emulated, "--quick", *only(check), "--out", tmp_path]
    models = {"NPU_NODE_MODEL_STORE": str(speech_store.root)} if model == WHISPER else quick_models
    if "hang" in fault:  # of the others no stall of a busy machine is one
        models = models | {"NPU_NODE_WATCHDOG_S": "3"}
    run(*words, status=1, **models, NPU_NODE_FAULTS=str(faults))
    report, checks = passport_of(tmp_path, model, "report")
    assert (report["verdict"], checks[check]["status"]) == ("failed", "failed")
    assert said in checks[check]["detail"]


@pytest.fixture(scope="module")
def by_path(tmp_path_factory, store):
    """Settings with a model that reads colours and one that ranks, both by path, on the emulated NPU."""
    directory = tmp_path_factory.mktemp("by_path")
    write_minilm(directory / "ranker", store.get(EMBEDDER).path)
    config = directory / "by_path.toml"
    colours = kept_colours(store)
    config.write_text(
        f'npu_emulation = true\ncompile_cache = "{colours.parent}/compiled"\n'
        f'[[models]]\nname = "colours"\npath = "{colours}"\nplacements = ["NPU"]\n'
        f"max_prompt_len = 256\nmin_response_len = 64\n"
        f'[[models]]\nname = "ranker"\npath = "{directory}/ranker"\nplacements = ["NPU"]\nnpu_buckets = [128]\n'
    )
    return config


@pytest.mark.parametrize(("model", "check"), [("colours", "images in turn"), ("ranker", AGREEMENT)])
def test_other_kinds_are_compared_with_this_cpu(tmp_path, by_path, model, check):
    words = ["certify", model, "--config", by_path, "--quick", "--out", tmp_path]
    # A vision model refuses structured output, so that is not checked.
    run(*words, *only(check, "structured output", "busy counter"))
    report, checks = passport_of(tmp_path, model, "report")
    assert (report["reference"], checks[check]["status"]) == ("this CPU", "passed"), checks[check]["detail"]
