"""Which chat template counts, that broken files stop the load with their names, and models without a template."""

import json
import re

import pytest

from tests.real.directories import exported_smollm
from worker_node.core.errors import BadRequest, ConfigurationError
from worker_node.models.store import open_directory
from worker_node.tasks.generate.chat_tokenizer import ChatTokenizer
from worker_node.tasks.generate.request import Message

pytestmark = pytest.mark.real

HELLO = [Message("user", "hello")]
FILES = ("chat_template.jinja", "template.jinja", "tokenizer_config.json")


@pytest.fixture
def exported(store, tmp_path):
    """An exported model without a chat template anywhere."""
    directory = exported_smollm(store, tmp_path / "model", without={"chat_template.jinja", "openvino_tokenizer.xml"})
    graph = (store.get("smollm2-135m-instruct").path / "openvino_tokenizer.xml").read_text(encoding="utf-8")
    (directory / "openvino_tokenizer.xml").write_text(re.sub(r"<chat_template .*?/>", "", graph), encoding="utf-8")
    return directory


def rendered(directory, messages=HELLO):
    return ChatTokenizer(directory, 8192).render(messages)


def write_template(directory, name, text):
    (directory / name).write_text(json.dumps({"chat_template": text}) if name.endswith(".json") else text)


def test_files_go_before_the_tokenizers_configuration_and_that_before_its_graph(store, exported, tmp_path):
    own = exported_smollm(store, tmp_path / "own", without={"chat_template.jinja"})
    assert rendered(own).endswith("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    for name in reversed(FILES):
        write_template(own, name, f"{name}: {{{{ messages[0].content }}}}")
        assert rendered(own) == f"{name}: hello"


def test_of_named_templates_the_default_one_counts(exported):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "[{{ messages[0].content }}]"}]
    write_template(exported, "tokenizer_config.json", named)
    assert rendered(exported) == "[hello]"


def test_a_model_without_a_template_takes_exactly_one_message_as_it_is(exported):
    tokenizer = ChatTokenizer(exported, 8192)
    assert tokenizer.render(HELLO) == "hello"
    assert tokenizer.encode_chat(HELLO) == tokenizer.encode_prompt("hello")
    for messages in ([Message("system", "be kind"), *HELLO], []):
        with pytest.raises(BadRequest, match="no chat template, so it takes exactly one message"):
            tokenizer.render(messages)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ("{% for m in messages %}{{ m.content }}", "Unterminated for at row 1, column 1:"),
        ("{{ messages[", "Expected "),
        ("{{ nothing.here }}", "'nothing' is not defined at row 1, column 12:"),
        ("{{ raise_exception('no') }}", "no at row 1"),
    ],
)
def test_a_broken_template_stops_the_load_with_its_file_and_the_reason(exported, name, broken, reason):
    write_template(exported, name, broken)
    with pytest.raises(ConfigurationError) as caught:
        rendered(exported)
    assert caught.value.message.startswith(f"{exported / name}: the chat template cannot be used: {reason}")


def test_a_template_that_takes_only_some_conversations_is_not_broken(exported):
    write_template(
        exported,
        FILES[0],
        "{% if messages|length < 3 %}{{ raise_exception('Too short!') }}{% endif %}{{ messages[2].content }}",
    )
    assert rendered(exported, [*HELLO, Message("assistant", "hi"), Message("user", "bye")]) == "bye"
    with pytest.raises(BadRequest, match="refuses this conversation: Too short!"):
        rendered(exported)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"{broken", b"\xff\xfe", b"[]", b""])
def test_a_broken_configuration_file_stops_the_load_with_its_name(exported, tmp_path, name, content):
    (exported / name).unlink(missing_ok=True)
    (exported / name).write_bytes(content)
    with pytest.raises(ConfigurationError, match=str(exported / name)):
        open_directory(exported, "m", tmp_path / "prepared")


@pytest.mark.parametrize("name", ["openvino_tokenizer.xml", "openvino_detokenizer.xml"])
def test_a_broken_tokenizer_stops_the_load_with_its_name(exported, name):
    (exported / name).unlink()
    (exported / name).write_text("<net")
    with pytest.raises(ConfigurationError, match=f"{exported}: .*{name}"):
        rendered(exported)
