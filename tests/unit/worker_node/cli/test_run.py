"""A chat in the terminal, against a scripted node: what is sent, what is shown, and how it ends."""

import contextlib
import io

import pytest

from worker_node.cli.main import main
from worker_node.cli.node_client import NodeCallFailed
from worker_node.cli.output import TOY_MODEL, TOY_NOTE
from worker_node.cli.run import Chat, converse


class ScriptedNode:
    """Answers each message with the next list of parts; an exception among them is raised there."""

    def __init__(self, *answers, capabilities=("completion",), missing=False):
        self.answers = list(answers)
        self.asked, self.pulled, self.loaded, self.closed = [], [], [], 0
        self.capabilities, self.missing, self.last = list(capabilities), missing, {}

    def call(self, method, path, body=None):
        if method == "GET":
            if self.missing and not self.pulled:
                raise NodeCallFailed(f"{path} not found", 404)
            return {"capabilities": self.capabilities, "id": TOY_MODEL}
        if path.endswith("/load"):
            self.loaded.append(path)
            return {}
        assert (path, body["texts"]) == ("/embeddings", ["a cat"])
        return {"embeddings": [[0.5, -0.5]]}

    def pull(self, name, progress):
        self.pulled.append(name)
        progress.stage("downloading x", 9)

    @contextlib.contextmanager
    def lines(self, path, body):
        self.asked.append([dict(message) for message in body["messages"]])
        try:
            yield self._stream(self.answers.pop(0))
        finally:
            self.closed += 1

    def _stream(self, parts):
        for part in parts:
            if isinstance(part, BaseException):
                raise part
            yield {"message": {"content": part}, "done": False}
        yield {"done": True} | self.last


def type_in(*lines):
    """What `input` would return, line by line; KeyboardInterrupt stands for Ctrl-C, the end for Ctrl-D."""
    remaining = list(lines)

    def read(_prompt):
        if not remaining:
            raise EOFError
        line = remaining.pop(0)
        if line is KeyboardInterrupt:
            raise KeyboardInterrupt
        return line

    return read


def chat_with(node, **options):
    shown = []
    return Chat(node, "m", write=shown.append, **options), shown


def test_a_conversation_is_streamed_and_remembered():
    node = ScriptedNode(["Par", "is"], ["Seine"])
    chat, shown = chat_with(node, system="be brief")
    assert converse(chat, type_in("capital?", "", "river?")) == 0
    assert shown == ["Par", "is", "\n", "Seine", "\n"]
    assert node.asked[1] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "capital?"},
        {"role": "assistant", "content": "Paris"},
        {"role": "user", "content": "river?"},
    ]


@pytest.mark.parametrize(
    ("last", "shown"),
    [
        (
            {"device": "NPU", "prompt_eval_count": 7, "eval_count": 2, "eval_duration": 10**9},
            "NPU: 7 + 2 tokens, 2.0 tokens/s",
        ),
        ({"prompt_eval_count": 7, "eval_count": 2, "eval_duration": 10**9}, "7 + 2 tokens, 2.0 tokens/s"),
        ({"device": None}, "0 + 0 tokens"),
    ],
)
def test_verbose_shows_of_an_answer_what_the_node_tells(capsys, last, shown):
    node = ScriptedNode(["Paris"])
    node.last = last
    chat_with(node, verbose=True)[0].answer("capital?")
    assert capsys.readouterr().err == f"\n[{shown}]\n"


def test_bye_ends_it_and_clear_forgets(capsys):
    node = ScriptedNode(["a"], ["b"])
    chat, _ = chat_with(node)
    chat.prepare()
    assert converse(chat, type_in("one", "/clear", "two", "/?", "/nothing", "/bye", "never read")) == 0
    assert node.asked[1] == [{"role": "user", "content": "two"}]
    err = capsys.readouterr().err
    assert err.startswith(TOY_NOTE)
    assert "/clear" in err
    assert "/nothing is not a command" in err


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (('"""one', "two", 'three"""'), "one\ntwo\nthree"),
        (('"""', "one", "", "two", '"""'), "one\n\ntwo\n"),
        (('"""one line"""',), "one line"),
        (("/etc/hosts is a file",), "/etc/hosts is a file"),
    ],
)
def test_a_message_may_have_several_lines(typed, message):
    node = ScriptedNode(["ok"])
    converse(chat_with(node)[0], type_in(*typed))
    assert node.asked == [[{"role": "user", "content": message}]]


def test_ctrl_c_stops_the_answer_and_not_the_chat():
    node = ScriptedNode(["half", KeyboardInterrupt(), "never"], ["next"])
    chat, shown = chat_with(node)
    converse(chat, type_in("one", KeyboardInterrupt, "two"))
    assert shown == ["half", "\n", "next", "\n"]
    assert node.closed == 2, "the stream is left, so that the node stops working on it"
    assert node.asked[1][1] == {"role": "assistant", "content": "half"}


def test_an_error_of_the_node_is_shown_and_the_message_taken_back(capsys):
    node = ScriptedNode([NodeCallFailed("too long")], ["fine"])
    converse(chat_with(node)[0], type_in("long", "short"))
    assert "npu-node: too long" in capsys.readouterr().err
    assert node.asked[1] == [{"role": "user", "content": "short"}]


def test_a_model_that_is_missing_is_pulled_first(capsys):
    node = ScriptedNode(missing=True)
    chat_with(node)[0].prepare()
    assert node.pulled == ["m"]
    assert "downloading x" in capsys.readouterr().err


def test_an_embedding_model_answers_with_a_vector():
    chat, shown = chat_with(ScriptedNode(capabilities=["embedding"]))
    chat.prepare()
    assert chat.answer("a cat")
    assert shown == ["[0.5, -0.5]\n"]


@pytest.mark.parametrize(("words", "piped"), [([], ""), ([], " \n"), ([""], "")])
def test_an_empty_prompt_loads_the_model_and_asks_it_nothing(monkeypatch, capsys, words, piped):
    node = ScriptedNode()
    monkeypatch.setattr("worker_node.cli.node_client.node_or_none", lambda _args: contextlib.nullcontext(node))
    monkeypatch.setattr("sys.stdin", io.StringIO(piped))
    assert main(["run", "m", *words]) == 0
    assert (node.loaded, node.asked) == (["/models/m/load"], [])
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "m: the prompt is empty, so the model is only loaded" in captured.err


@pytest.mark.parametrize(
    "words", ["", "--job title", "--input text", "--job title --input text tiny", "tiny --input text"]
)
def test_run_takes_a_model_or_a_bounded_job_with_its_input(words, capsys):
    with pytest.raises(SystemExit):
        main(["run", *words.split()])
    assert "takes a MODEL (npu-node list --all shows them), or --job with --input" in capsys.readouterr().err


def test_without_a_node_the_message_names_the_command_that_starts_one(monkeypatch, capsys):
    monkeypatch.setenv("NPU_NODE_URL", "none")
    assert main(["run", "tiny", "hello"]) == 1
    assert "npu-node serve" in capsys.readouterr().err
