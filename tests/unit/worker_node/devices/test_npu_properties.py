"""What is asked of OpenVINO for the NPU, and that nothing else takes over in silence."""

import pytest

from worker_node.devices.blobs import brief, describe_npu, npu_properties, require_npu


class Core:
    def __init__(self, devices, **properties):
        self.available_devices = devices
        self.properties = properties

    def get_property(self, device, name):
        assert device == "NPU"
        if name not in self.properties:
            raise RuntimeError("Exception from a.cpp:1:\nUnsupported configuration key\n")
        return self.properties[name]


def test_the_real_npu_gets_what_was_set_and_nothing_of_the_emulation():
    properties = npu_properties(
        emulated=False, cache_dir="/c", plugin_config={"NPU_TURBO": True}, MAX_PROMPT_LEN=64, PREFILL_HINT=None
    )
    assert properties == {"MAX_PROMPT_LEN": 64, "CACHE_DIR": "/c", "NPU_TURBO": True}


def test_emulation_names_one_device_and_cannot_be_overridden():
    properties = npu_properties(emulated=True, cache_dir=None, plugin_config={"NPUW_DEVICES": "NPU,CPU"})
    assert properties["NPUW_DEVICES"] == "CPU"
    assert properties["NPUW_ONLINE_PIPELINE"] == "NONE"
    assert properties["NPU_USE_NPUW"] == "YES"
    assert "CACHE_DIR" not in properties


def test_a_missing_npu_is_named_with_what_there_is():
    with pytest.raises(RuntimeError, match="only CPU, GPU"):
        require_npu(Core(["CPU", "GPU"]), emulated=False)
    require_npu(Core(["CPU"]), emulated=True)
    require_npu(Core(["CPU", "NPU"]), emulated=False)


def test_a_device_is_described_as_far_as_it_can_be_read():
    full = Core(["NPU"], FULL_DEVICE_NAME="Intel(R) AI Boost", NPU_DRIVER_VERSION=1688)
    assert describe_npu(full, emulated=False) == ("Intel(R) AI Boost", "1688")
    assert describe_npu(Core(["NPU"]), emulated=False) == ("NPU", None)
    name, driver = describe_npu(full, emulated=True)
    assert "emulated" in name
    assert driver is None


def test_errors_of_openvino_are_shown_without_source_positions():
    assert brief(RuntimeError("Exception from src/x.cpp:1:\nZE_RESULT_ERROR\n\n")) == "ZE_RESULT_ERROR"
    assert brief(RuntimeError("")) == "RuntimeError"
